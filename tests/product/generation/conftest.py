"""What tests of generation share."""

import pytest

from buddy.generation import depth_drafts
from buddy.generation.payoff import DraftCost


@pytest.fixture
def long_drafts(monkeypatch):
    """Drafts go on whatever their chance and their cost: a tiny model is never sure nor slow."""
    monkeypatch.setattr(depth_drafts, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(depth_drafts, "DRAFTED_WORDS", 1.0)
    monkeypatch.setattr(depth_drafts, "places_that_pay", lambda chances, *_: range(len(chances)))
    monkeypatch.setattr(DraftCost, "plain_s", lambda self, kind: 1.0)
