import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy.budget.blocks import Budget
from buddy.budget.request import Auto, Blocks, Mean, read_blocks, read_budget
from buddy.errors import BudgetError
from buddy.generation.budgets import read_rows


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
    assert read_blocks(value).blocks(num_blocks) == blocks


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
        read_blocks(value).blocks(30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_model_of_few_blocks_runs_at_full_depth_alone(num_blocks):
    assert Budget.full(num_blocks) == Budget(num_blocks, num_blocks)
    assert Budget.full(num_blocks).ratio == 1
    for wrong in (0.4, f"{num_blocks - 1} blocks", f"{num_blocks + 1} blocks", 0.0, 1.5):
        with pytest.raises(BudgetError) as caught:
            read_blocks(wrong).blocks(num_blocks)
        assert "\n" not in str(caught.value)
        if wrong not in (0.0, 1.5):
            assert f"full depth alone, {num_blocks} block" in str(caught.value)
    with pytest.raises(BudgetError):
        Budget.full(0)


def test_a_budget_that_was_made_for_another_depth_is_refused():
    mine = Budget(18, 32)
    assert read_blocks(mine).blocks(32) == 18
    with pytest.raises(BudgetError, match=r"18 of 30 blocks is for a model of 30, and .* has 32"):
        read_blocks(Budget(18, 30)).blocks(32)
    with pytest.raises(BudgetError, match="is for a model of 32"):
        [row_budget.blocks(30) for row_budget in read_rows([0.5, mine], 2)]


def test_a_mean_is_read_and_a_bad_one_is_quoted_whole():
    assert read_budget("mean:0.7") == Mean(mean=Blocks(amount=Fraction(7, 10)))
    assert read_budget("0.7") == Blocks(amount=Fraction(7, 10))
    for bad in ("mean:", "mean:2", "mean:auto"):
        with pytest.raises(BudgetError, match=f"budget '{bad}' cannot be read: .*mean:0.7"):
            read_budget(bad)


def test_auto_is_left_to_the_predictor():
    assert read_budget("auto") == Auto()


def test_a_list_has_one_budget_a_row():
    def blocks_of(budget, batch):
        return [row_budget.blocks(30) for row_budget in read_rows(budget, batch)]

    assert blocks_of([0.5, "18 blocks"], 2) == [15, 18]
    assert blocks_of(0.5, 3) == [15, 15, 15]
    with pytest.raises(BudgetError, match="2 budgets for a batch of 3 rows"):
        read_rows([0.5, 0.6], 3)


@given(st.integers(1, 128), st.floats(0, 1, exclude_min=True))
def test_a_fraction_never_buys_more_than_it_names_plus_a_half(num_blocks, ratio):
    exact = Fraction(repr(ratio)) * num_blocks
    try:
        blocks = Budget.from_ratio(ratio, num_blocks).blocks
    except BudgetError:
        assert exact <= min(3, num_blocks) - Fraction(1, 2)
        return
    assert -Fraction(1, 2) < exact - blocks <= Fraction(1, 2)
