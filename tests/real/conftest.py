"""Skips where the default model cannot be had."""

import pytest

from buddy.errors import FetchError
from buddy.hub.store import ensure_published


@pytest.fixture(autouse=True, scope="session")
def _default_model():
    try:
        ensure_published()
    except FetchError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
