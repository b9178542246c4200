"""The shipped prior is the measurement that is committed."""

import json
from importlib.resources import files
from pathlib import Path

from buddy.checkpoint.quick_prior import shipped_prior
from buddy.hub.presets import DEFAULT_MODEL
from buddy.policies.static import StaticPolicy

RECORD = Path(__file__).parents[3] / "results" / "importance" / "cosine.json"


def test_the_default_prior_is_a_committed_record_and_removes_in_its_order():
    shipped = files("buddy.hub") / "priors" / f"{DEFAULT_MODEL}.json"
    assert json.loads(shipped.read_text()) == json.loads(RECORD.read_text())
    order = StaticPolicy(shipped_prior(DEFAULT_MODEL), 30).removal_order
    assert list(order) == json.loads(RECORD.read_text())["results"]["removal_order"]
