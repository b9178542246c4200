"""The table of budgets that every reader must read alike: the product, the plugin, the replicas."""

import json
from pathlib import Path

_TABLE = json.loads(Path(__file__).with_name("budget_cases.json").read_text())
SETTINGS = _TABLE["settings"]
CASES = _TABLE["cases"]
REFUSED = "refused"


def names(cases):
    """What a case asks, for the names of tests."""
    return [ascii(case["request"])[:60] for case in cases]
