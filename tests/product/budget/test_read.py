import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy.budget.blocks import Budget
from buddy.budget.read import AUTO, Mean, parse_budget, parse_budgets, read_mean
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
        (1.0, 1, 1),
        (1, 2, 2),
        ("100%", 2, 2),
        ("1 block", 1, 1),
        ("2 blocks", 2, 2),
        (0.9, 2, 2),  # 1.8
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
        ("-4 blocks", "cannot be read"),
        ("9" * 5000 + " blocks", "cannot be read"),
        (0.05, "3 to 30 blocks, or a fraction from 0.1"),
    ],
)
def test_any_other_budget_is_refused_with_what_is_allowed(value, says):
    with pytest.raises(BudgetError, match=says) as caught:
        parse_budget(value, 30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_model_of_few_blocks_runs_at_full_depth_alone(num_blocks):
    assert Budget.full(num_blocks) == Budget(num_blocks, num_blocks)
    assert Budget.full(num_blocks).ratio == 1
    for wrong in (0.4, f"{num_blocks - 1} blocks", f"{num_blocks + 1} blocks", 0.0, 1.5):
        with pytest.raises(BudgetError) as caught:
            parse_budget(wrong, num_blocks)
        assert "\n" not in str(caught.value)
        if wrong not in (0.0, 1.5):
            assert f"full depth alone, {num_blocks} block" in str(caught.value)
    with pytest.raises(BudgetError):
        Budget.full(0)


def test_a_budget_that_was_made_for_another_depth_is_refused():
    mine = Budget(18, 32)
    assert parse_budget(mine, 32) is mine
    with pytest.raises(BudgetError, match=r"18 of 30 blocks is for a model of 30, and .* has 32"):
        parse_budget(Budget(18, 30), 32)
    with pytest.raises(BudgetError, match="is for a model of 32"):
        parse_budgets([0.5, mine], 30, 2)


def test_a_mean_is_read_and_a_bad_one_is_quoted_whole():
    assert read_mean("mean:0.7") == Mean(Fraction(7, 10))
    assert read_mean("0.7") is None
    for bad in ("mean:", "mean:2", "mean:auto"):
        with pytest.raises(BudgetError, match=f"budget '{bad}' cannot be read: .*mean:0.7"):
            read_mean(bad)


def test_auto_is_left_to_the_predictor():
    assert parse_budget("auto", 30) == AUTO


def test_a_list_has_one_budget_a_row():
    blocks = [budget.blocks for budget in parse_budgets([0.5, "18 blocks"], 30, 2)]
    assert blocks == [15, 18]
    assert [budget.blocks for budget in parse_budgets(0.5, 30, 3)] == [15, 15, 15]
    with pytest.raises(BudgetError, match="2 budgets for a batch of 3 rows"):
        parse_budgets([0.5, 0.6], 30, 3)


@given(st.integers(1, 128), st.floats(0, 1, exclude_min=True))
def test_a_fraction_never_buys_more_than_it_names_plus_a_half(num_blocks, ratio):
    exact = Fraction(repr(ratio)) * num_blocks
    try:
        blocks = Budget.from_ratio(ratio, num_blocks).blocks
    except BudgetError:
        assert exact <= min(3, num_blocks) - Fraction(1, 2)
        return
    assert -Fraction(1, 2) < exact - blocks <= Fraction(1, 2)
