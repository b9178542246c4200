import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buddy.depth.plan import NO_LANES, DepthPlan
from buddy.depth.select import select_blocks
from buddy.errors import BudgetError, PolicyError

NUM_BLOCKS = 7
scores_with_ties = st.lists(
    st.sampled_from([-float("inf"), -1.0, 0.0, -0.0, 0.5, 0.5, 1.0, 3e38, float("inf")]),
    min_size=NUM_BLOCKS,
    max_size=NUM_BLOCKS,
)


def select(scores, *blocks, pinned=(0, -1)):
    return select_blocks(torch.tensor(scores), torch.tensor(blocks), pinned=pinned)


def test_the_best_are_kept_with_the_pinned():
    plan = select([[-9.0, 1.0, 5.0, 2.0, 4.0, 3.0, -9.0]], 4)
    assert plan.executed_sets == ((0, 2, 4, 6),)


def test_ties_go_to_the_shallower_block():
    assert select([[0.0] * NUM_BLOCKS], 5).executed_sets == ((0, 1, 2, 3, 6),)


def test_an_infinite_score_does_not_push_out_a_pinned_block():
    plan = select([[0.0, *[float("inf")] * 5, 0.0]], 3)
    assert plan.executed_sets == ((0, 1, 6),)


@given(st.lists(st.tuples(scores_with_ties, st.integers(2, NUM_BLOCKS)), min_size=1, max_size=5))
def test_depth_is_the_budget_for_any_scores_ties_and_mix_of_rows(rows):
    plan = select([scores for scores, _ in rows], *[blocks for _, blocks in rows])
    assert plan.depth.tolist() == [blocks for _, blocks in rows]
    assert bool(plan.mask[:, [0, -1]].all())


@given(scores_with_ties, st.integers(2, NUM_BLOCKS - 1))
def test_a_larger_budget_keeps_a_superset(scores, blocks):
    small, large = select([scores, scores], blocks, blocks + 1).executed_sets
    assert set(small) < set(large)


@given(st.lists(scores_with_ties, min_size=2, max_size=5), st.randoms())
def test_permuting_the_batch_permutes_the_plans(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    budgets = [2 + i % 5 for i in range(len(rows))]
    plain = select(rows, *budgets).executed_sets
    moved = select([rows[i] for i in order], *[budgets[i] for i in order]).executed_sets
    assert moved == tuple(plain[i] for i in order)


def test_nan_and_unspendable_budgets_are_refused():
    with pytest.raises(PolicyError, match="NaN"):
        select([[float("nan")] * NUM_BLOCKS], 4)
    with pytest.raises(BudgetError, match="budget of 1 blocks"):
        select([[0.0] * NUM_BLOCKS], 1)
    with pytest.raises(BudgetError, match="budget of 8 blocks"):
        select([[0.0] * NUM_BLOCKS] * 2, 4, 8)
    with pytest.raises(BudgetError, match="3 of the 7 blocks always run"):
        select([[0.0] * NUM_BLOCKS], 2, pinned=(0, 1, -1))


def test_a_plan_divides_lanes_without_a_gather_where_all_agree():
    plan = DepthPlan(torch.tensor([[True, False, True], [True, False, False]]))
    assert plan.by_block[0] == (None, NO_LANES)
    assert plan.by_block[1] == (NO_LANES, None)
    assert plan.by_block[2].run.tolist() == [0]
    assert plan.by_block[2].skip.tolist() == [1]
