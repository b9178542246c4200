"""A budget is read exactly, or refused in one line."""

import json
from pathlib import Path

import pytest

from buddy_vllm.budget import read_budget
from buddy_vllm.errors import BudgetError


@pytest.mark.parametrize(
    ("value", "blocks"),
    [
        (1.0, 30),
        (1, 30),
        (0.6, 18),
        ("0.6", 18),
        ("60%", 18),
        (" 18 blocks ", 18),
        ("3 BLOCKS", 3),
        (0.55, 16),  # exactly 16.5: a half goes down
        ("55%", 16),
        (0.1, 3),
        ("auto", "auto"),
        (" AUTO ", "auto"),
    ],
)
def test_what_is_a_budget(value, blocks):
    assert read_budget(value, 30) == blocks


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "budget 0 is not allowed"),
        (-0.5, "not allowed"),
        (1.5, "not allowed"),
        (18, 'for a count write "18 blocks"'),
        (0.01, "comes to 0 blocks: expected 3 to 30"),
        ("2 blocks", "expected 3 to 30 blocks"),
        ("31 blocks", "expected 3 to 30 blocks"),
        (float("nan"), "cannot be read"),
        (float("inf"), "cannot be read"),
        (10**400, "not allowed"),
        ("", "budget '' cannot be read"),
        ("abc", "cannot be read"),
        ("1e-1", "cannot be read"),
        ("+0.5", "cannot be read"),
        ("\u0660.\u0665", "cannot be read"),
        ("9" * 10_000, "cannot be read"),
        (True, "cannot be read"),
        ([0.5], "cannot be read"),
        ({"a": 1}, "cannot be read"),
    ],
)
def test_what_is_none(value, says):
    with pytest.raises(BudgetError, match="budget") as caught:
        read_budget(value, 30)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_blocks_that_always_run_are_the_least():
    assert read_budget("6 blocks", 30, least=6) == 6
    with pytest.raises(BudgetError, match="expected 6 to 30"):
        read_budget("5 blocks", 30, least=6)


TABLE = json.loads((Path(__file__).parents[3] / "tests" / "budget_cases.json").read_text())
CASES = [case for case in TABLE["cases"] if "plugin" in case]


@pytest.mark.parametrize("case", CASES, ids=[ascii(case["request"])[:60] for case in CASES])
def test_it_is_read_as_buddy_reads_it_or_not_supported(case):
    read = case["product"]
    try:
        blocks = read_budget(case["request"]["budget"], TABLE["settings"]["num_blocks"])
    except BudgetError:
        blocks = "refused"
    assert blocks == case["plugin"]
    if blocks != "refused":
        assert blocks == (read["kind"] if read["kind"] == "auto" else read["most"])
