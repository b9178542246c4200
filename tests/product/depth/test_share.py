"""One ranking for a batch, finite whatever the scores are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from buddy.depth.select import select_blocks
from buddy.depth.share import share_ranking
from buddy.errors import PolicyError

PINNED = (0, -1)
INF, NAN = math.inf, math.nan

anything = st.floats(width=32, allow_nan=False)  # infinities and the largest numbers too


def everyone(scores):
    return torch.ones(len(scores), dtype=torch.bool)


def shared(rows, pinned=PINNED):
    scores = torch.tensor(rows)
    return share_ranking(scores, pinned, everyone(scores))


def order(row):
    """Blocks from first to last, ties to the shallower, as `select_blocks` ranks them."""
    row = row.tolist()
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)


@pytest.mark.parametrize("pinned", [PINNED, (0, 1, -1), (), (0, 1, 2, 3, -1)])
def test_finite_scores_are_standardised_by_row_and_averaged(pinned):
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) * 100 + 7
    asked = torch.tensor([True, False, True, True, False])
    free = [block for block in range(6) if block not in {block % 6 for block in pinned}]
    chosen = scores[:, free]
    deviation = chosen.std(1, correction=0, keepdim=True)
    unit = torch.where(deviation > 0, deviation, 1.0)  # one free block has none
    expected = ((scores - chosen.mean(1, keepdim=True)) / unit)[asked].mean(0).expand(5, 6)
    found = share_ranking(scores, pinned, asked)
    assert found.dtype == torch.float32
    assert_close(found[:, free], expected[:, free], atol=1e-5, rtol=1e-5)  # float32 sums
    assert_close(share_ranking(scores, pinned, ~asked & asked), shared(scores.tolist(), pinned))


@given(st.lists(st.lists(anything, min_size=6, max_size=6), min_size=1, max_size=5), st.data())
def test_no_scores_but_nan_make_a_nan_and_every_budget_is_kept(rows, data):
    found = shared(rows)
    assert not bool(found.isnan().any())
    assert bool(found[:, 1:-1].isfinite().all())
    budgets = data.draw(st.lists(st.integers(2, 6), min_size=len(rows), max_size=len(rows)))
    mask = select_blocks(found, torch.tensor(budgets)).mask
    assert mask.sum(1).tolist() == budgets
    assert int(mask.any(0).sum()) == max(budgets)


@given(
    st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 2.0, 9.0, INF]), min_size=6, max_size=6)
)
def test_a_row_alone_is_ranked_as_it_ranks_itself(row):
    scores = torch.tensor([row])
    found = share_ranking(scores, PINNED, everyone(scores))
    for blocks in (2, 3, 4, 5, 6):
        budget = torch.tensor([blocks])
        assert select_blocks(found, budget) == select_blocks(scores, budget)


def test_infinite_scores_by_hand():
    # The finite free scores 1, 3 stand at -1, 1; so infinities stand at 2 and -2.
    found = shared([[0.0, INF, 1.0, 3.0, -INF, 0.0]])
    assert found[0, 1:5].tolist() == [2.0, -1.0, 1.0, -2.0]
    # The other row stands at -1, 1, -1, 1: the means are 0.5, 0, 0, -0.5.
    found = shared([[0.0, INF, 1.0, 3.0, -INF, 0.0], [0.0, 5.0, 6.0, 5.0, 6.0, 0.0]])
    assert found[0, 1:5].tolist() == [0.5, 0.0, 0.0, -0.5]
    assert torch.equal(found[0], found[1])


def test_rows_that_agree_on_an_infinity_rank_it_first_or_last():
    rows = [[0.0, 1e30, INF, -1e30, -INF, 0.0], [0.0, 2.0, INF, 9.0, -INF, 0.0]]
    ranked = [block for block in order(shared(rows)[0]) if block not in (0, 5)]
    assert ranked[0] == 2
    assert ranked[-1] == 4


def test_opposite_infinities_cancel():
    found = shared([[0.0, INF, 1.0, 3.0, 2.0, 0.0], [0.0, -INF, 1.0, 3.0, 2.0, 0.0]])
    assert found[0, 1] == 0
    assert order(found[0, 1:5]) == [2, 0, 3, 1]


def test_a_row_of_equal_scores_has_no_say():
    other = [0.0, 4.0, 3.0, 1.0, 2.0, 0.0]
    for same in (0.1, 7.0, 3e38, INF, -INF):
        found = shared([[same] * 6, other])
        assert order(found[0, 1:5]) == [0, 1, 3, 2]


def test_equal_scores_but_for_an_infinity():
    found = shared([[0.0, 0.1, 0.1, INF, 0.1, 0.0]])
    assert found[0, 3] > found[0, 1:3].max()
    assert len(set(found[0, [1, 2, 4]].tolist())) == 1


@pytest.mark.parametrize("score", [0.3, INF, -INF])
def test_one_free_block(score):
    found = shared([[9.0, score, -INF], [INF, 2.0, 9.0]])
    assert bool(found.isfinite().all())
    assert select_blocks(found, torch.tensor([2, 3])).executed_sets == ((0, 2), (0, 1, 2))


def test_pinned_scores_have_no_influence():
    plain = shared([[0.0, 1.0, 2.0, 4.0, 3.0, 0.0]])
    odd = shared([[INF, 1.0, 2.0, 4.0, 3.0, -INF]])
    assert torch.equal(plain[:, 1:5], odd[:, 1:5])
    assert bool(odd.isfinite().all())


def test_nan_of_a_row_that_votes_is_left_to_be_refused():
    scores = torch.tensor([[0.0, NAN, INF, 4.0, 3.0, 0.0], [0.0, 1.0, 2.0, 4.0, 3.0, 0.0]])
    with pytest.raises(PolicyError, match="NaN"):
        select_blocks(share_ranking(scores, PINNED, everyone(scores)), torch.tensor([3, 3]))
    silent = share_ranking(scores, PINNED, torch.tensor([False, True]))
    assert torch.equal(silent[:1], shared([[0.0, 1.0, 2.0, 4.0, 3.0, 0.0]]))
