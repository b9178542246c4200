"""The greedy loop by any cost: worked by hand, and against models whose blocks are deleted."""

import pytest
import torch

from buddy.errors import ModelError
from buddy.importance.search.sleb import sleb_search
from buddy.methods.pudding.greedy import greedy_order
from tests.tiny import delete_blocks, random_ids, tiny_buddy, tiny_model

PRICES = torch.tensor([100.0, 3.0, 1.0, 1.0, 5.0, 100.0])


def priced(sets):
    """Each block has a price, and blocks 1 and 4 cost nothing together."""
    gone = ~sets
    both = gone[:, 1] & gone[:, 4]
    return (gone * PRICES).sum(1) - 8.0 * both


def test_worked_by_hand():
    told = []
    found = greedy_order(6, 9, priced, on_round=told.append)
    # 2 before 3, a tie; then 1 (5) before 4 (7); then 4, with which 1 costs nothing.
    assert found.order == (2, 3, 1, 4)
    assert found.costs == (1.0, 2.0, 5.0, 2.0)
    assert [order.num_removed for order in told] == [1, 2, 3, 4]
    assert told[0].order == (2, 3, 1, 4)


def test_it_goes_on_from_what_is_gone_and_the_rest_follow_as_last_ranked():
    found = greedy_order(6, 1, priced, begin=[1])
    assert found.order == (1, 4, 2, 3)
    assert (found.costs, found.num_removed) == ((0.0,), 2)
    assert greedy_order(6, 0, priced, begin=[3, 1]).order == (3, 1)


def test_by_the_loss_of_text_it_is_the_sleb_search():
    ids = random_ids(3, 12)
    backbone = tiny_buddy().backbone

    def cost(sets):
        losses = []
        for kept in sets:
            left = delete_blocks(tiny_model(), (~kept).nonzero()[:, 0].tolist())
            with torch.no_grad():
                losses.append(left(ids, labels=ids).loss)
        return torch.stack(losses)

    searched = sleb_search(backbone, ids, 4)
    found = greedy_order(6, 4, cost)
    assert found.order == searched.order
    # atol: sums in another order.
    torch.testing.assert_close(found.costs, searched.nll[1:], atol=1e-4, rtol=1e-4)


def test_a_cost_that_is_no_number_is_refused():
    with pytest.raises(ModelError, match="not a number"):
        greedy_order(6, 1, lambda sets: torch.full((len(sets),), float("nan")))
