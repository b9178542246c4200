"""Conditions have the keys, labels and fields that 0ce0a03 gave them, so old logs still match."""

import json
from pathlib import Path

from buddy.lab.evaluation.conditions import plan_conditions
from tests.product.routing.test_ledger import ledger
from tests.tiny import tiny_buddy

OLD = json.loads(Path(__file__).with_name("conditions.json").read_text())
"""What it declared in a sample log, of the model, policies and budgets below."""
POLICIES = ("routed", "mine=static:2,3,1", "random:7")
BUDGETS = (
    *("1.0", "0.5", "4 blocks", "auto", "mean:0.75", "mean:0.7"),
    *("prefill:1.0,decode:0.5", "prefill:0.5,decode:1.0", "prefill:1.0,decode:mean:0.75"),
    "prefill:3 blocks,decode:0.5",  # the same as 0.5
)


def test_what_a_sample_log_declares_is_what_it_was():
    model = tiny_buddy(predictor=True)
    model.ledger = ledger((3, 4, 6), [1.05, 1.02, 1.0], {7: [2.0, 1.0, 0.0]}, [0.1, 0.1, 0.1])
    conditions = plan_conditions(model, POLICIES, BUDGETS, auto=True, means=True)
    assert [{"key": one.key, **one.describe()} for one in conditions] == OLD
