"""What tests of generation share."""

import pytest

from buddy.generation import speculative


@pytest.fixture
def long_drafts(monkeypatch):
    """Drafts of any token go on whatever their chance: a tiny model is never sure."""
    monkeypatch.setattr(speculative, "_LEAST_CHANCE", 0.0)
    monkeypatch.setattr(speculative, "_DRAFTED_WORDS", 1.0)
