"""The table of budgets that every reader must read alike: the product, the plugin, the replicas."""

import json
from pathlib import Path

from buddy.budget.thinking import ThinkingMarks

_TABLE = json.loads(Path(__file__).with_name("budget_cases.json").read_text())
SETTINGS = _TABLE["settings"]
CASES = _TABLE["cases"]
REFUSED = "refused"
MARKS = ThinkingMarks("<think>", "</think>", 1, 2)
"""Of the model that the table is about."""


def names(cases):
    """What a case asks, for the names of tests."""
    return [ascii(case["request"])[:60] for case in cases]
