"""The SLEB loop by any cost: round by round, the block whose absence costs least goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.errors import ModelError

Cost = Callable[[Bool[Tensor, "candidates blocks"]], Float[Tensor, " candidates"]]
"""What each of some sets costs, True = run; lower is better."""


@dataclass(frozen=True, slots=True)
class GreedyOrder:
    """The order as far as the loop has come.

    Attributes:
        order: The middle blocks, each once: those removed, and the others as the last round ranks
            them, the cheapest to lose first. Without a round, the removed ones alone.
        costs: After each removal that was searched.
        num_removed: Blocks that are gone, those begun with and those searched.
    """

    order: tuple[int, ...]
    costs: tuple[float, ...]
    num_removed: int


def greedy_order(
    num_blocks: int,
    rounds: int,
    cost: Cost,
    *,
    begin: Sequence[int] = (),
    on_round: Callable[[GreedyOrder], None] = lambda search: None,
) -> GreedyOrder:
    """Remove blocks one by one; the first and the last stay, and of equals the shallower goes.

    Args:
        num_blocks: Blocks of the model.
        rounds: Removals to search; fewer where no block is left.
        cost: Of the sets in which one more block is gone.
        begin: Blocks that are gone already, in their order.
        on_round: Told the order so far, after every round.

    Raises:
        ModelError: A cost is NaN or infinite.

    Source: SLEB.
    """
    search = GreedyOrder(tuple(begin), (), len(begin))
    for _ in range(min(rounds, num_blocks - 2 - len(begin))):
        gone = search.order[: search.num_removed]
        rest = [block for block in range(1, num_blocks - 1) if block not in gone]
        sets = torch.ones(len(rest), num_blocks, dtype=torch.bool)
        for row, block in enumerate(rest):
            sets[row, [*gone, block]] = False
        costs = cost(sets).cpu().double()
        if not bool(costs.isfinite().all()):
            raise ModelError(
                "the cost of a set of blocks is not a number: the model's weights are damaged or "
                "its number format overflows; load it in bfloat16 or float32"
            )
        ranked = [rest[place] for place in torch.argsort(costs, stable=True).tolist()]
        search = GreedyOrder(
            (*gone, *ranked), (*search.costs, float(costs.min())), search.num_removed + 1
        )
        on_round(search)
    return search
