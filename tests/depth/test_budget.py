import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy.depth.budget import AUTO, Budget, parse_budget, parse_budgets
from buddy.errors import BudgetError


@pytest.mark.parametrize(
    ("value", "num_blocks", "blocks"),
    [
        (0.75, 30, 22),  # 22.5: a half goes down
        (0.55, 30, 16),  # 16.5 as written, though 0.55 * 30 > 16.5 in floating point
        (0.35, 30, 10),
        (0.6, 30, 18),
        ("60%", 30, 18),
        (" 0.6 ", 30, 18),
        ("18 blocks", 30, 18),
        ("18blocks", 30, 18),
        (1, 32, 32),
        (1.0, 28, 28),
        ("100%", 28, 28),
        (0.1, 30, 3),
        (0.875, 32, 28),
    ],
)
def test_a_budget_is_read_as_written(value, num_blocks, blocks):
    assert parse_budget(value, num_blocks) == Budget(blocks, num_blocks)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, r"\(0, 1\]"),
        (-1, r"\(0, 1\]"),
        (1.5, r"\(0, 1\]"),
        (18, "18 blocks"),
        (math.nan, r"\(0, 1\]"),
        (math.inf, r"\(0, 1\]"),
        ("nan", r"\(0, 1\]"),
        ("abc", "cannot be read"),
        ("", "cannot be read"),
        (True, "cannot be read"),
        ("2 blocks", "3 to 30 blocks"),
        ("31 blocks", "3 to 30 blocks"),
        ("-4 blocks", "3 to 30 blocks"),
        ("9" * 5000 + " blocks", "cannot be read"),
        (0.05, "at least 3 blocks"),
    ],
)
def test_any_other_budget_is_refused_with_what_is_allowed(value, says):
    with pytest.raises(BudgetError, match=says) as caught:
        parse_budget(value, 30)
    assert "\n" not in str(caught.value)


def test_auto_is_left_to_the_predictor():
    assert parse_budget("auto", 30) == AUTO


def test_a_list_has_one_budget_a_row():
    blocks = [budget.blocks for budget in parse_budgets([0.5, "18 blocks"], 30, 2)]
    assert blocks == [15, 18]
    assert [budget.blocks for budget in parse_budgets(0.5, 30, 3)] == [15, 15, 15]
    with pytest.raises(BudgetError, match="2 budgets for a batch of 3 rows"):
        parse_budgets([0.5, 0.6], 30, 3)


@given(st.integers(3, 128), st.floats(0, 1, exclude_min=True))
def test_a_fraction_never_buys_more_than_it_names_plus_a_half(num_blocks, ratio):
    exact = Fraction(repr(ratio)) * num_blocks
    try:
        blocks = Budget.from_ratio(ratio, num_blocks).blocks
    except BudgetError:
        assert exact <= Fraction(5, 2)
        return
    assert -Fraction(1, 2) < exact - blocks <= Fraction(1, 2)
