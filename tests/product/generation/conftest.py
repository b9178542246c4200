"""What tests of generation share."""

import pytest

from tests.product.drafting import always_draft


@pytest.fixture
def long_drafts(monkeypatch):
    """Drafts go on whatever their chance and their cost."""
    always_draft(monkeypatch)
