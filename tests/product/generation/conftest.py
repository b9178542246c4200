"""What tests of generation share."""

import pytest

from buddy.generation import depth_drafts


@pytest.fixture
def long_drafts(monkeypatch):
    """Drafts of any token go on whatever their chance: a tiny model is never sure."""
    monkeypatch.setattr(depth_drafts, "LEAST_CHANCE", 0.0)
    monkeypatch.setattr(depth_drafts, "DRAFTED_WORDS", 1.0)
