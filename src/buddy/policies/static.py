"""Static pruning: one removal order for every input."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, PolicyResources, RowBudgets
from buddy.depth.prior import OnProgress, Prior
from buddy.errors import PolicyError, shown
from buddy.policies.measured import read_order


class StaticPolicy(DepthPolicy):
    """Blocks go in one order, the first named first; blocks not named never go.

    Args:
        order: 0-based blocks, least important first. It may be as short as the one set of blocks
            that a method removes; then a smaller budget is refused. Or a prior: the middle blocks
            go in ascending order of it, of equals the deeper first. A prior that is still to be
            measured is measured when an order is first needed.
        num_blocks: Blocks of the model.
        source: Where a given order comes from, for summary lines.

    Raises:
        PolicyError: A block is named twice, or does not exist, or the prior is of another model.
    """

    name = "static"

    def __init__(
        self, order: Sequence[int] | Prior, num_blocks: int, *, source: str = "given order"
    ) -> None:
        super().__init__(num_blocks)
        self._order, self._source = order, source
        removable = set(range(1, num_blocks - 1) if isinstance(order, Prior) else order)
        self.pinned = tuple(block for block in range(num_blocks) if block not in removable)
        if not isinstance(order, Prior) or order.is_known:
            _ = self.removal_order

    @cached_property
    def removal_order(self) -> tuple[int, ...]:
        """Blocks that may go, least important first."""
        order = self._order
        if isinstance(order, Prior):
            return _ascending(order.values(), self.num_blocks)
        if len(set(order)) != len(order) or not set(order) <= set(range(self.num_blocks)):
            raise PolicyError(
                f"a removal order names each block once, from 0 to {self.num_blocks - 1}, got "
                f"{shown(order)}"
            )
        return tuple(order)

    @cached_property
    def _scores(self) -> Float[Tensor, " blocks"]:
        scores = torch.zeros(self.num_blocks)
        scores[list(self.removal_order)] = torch.arange(1.0, len(self.removal_order) + 1)
        return scores

    def prepare(self, on_progress: OnProgress | None = None) -> None:
        """Measure the prior now, if the order is by one that is not known."""
        if isinstance(self._order, Prior):
            self._order.values(on_progress)

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "StaticPolicy":
        """Make it from `static` (the model's prior), `static:12,11,20` or `static:RECORD.json`.

        A record is what `buddy importance` writes.
        """
        if not argument:
            if resources.prior is None:
                raise PolicyError(
                    "this model has no prior to order its blocks by: load it with from_pretrained, "
                    "which measures one, name the blocks to remove, as in static:12,11,20, or use "
                    "random"
                )
            return cls(resources.prior, resources.num_blocks)
        if argument.endswith(".json"):
            order, source = read_order(Path(argument), resources)
            return cls(order, resources.num_blocks, source=source)
        try:
            order = [int(block) for block in argument.split(",")]
        except ValueError:
            raise PolicyError(
                "policy static:ORDER takes block numbers, as in static:12,11,20, got "
                f"{argument[:80]!r}"
            ) from None
        return cls(order, resources.num_blocks)

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """Place in the removal order: the later, the higher; on the host, where a plan is made."""
        return self._scores.expand(state.rows, -1)

    def describe(self) -> str:
        """A few words for a summary line."""
        order = self._order
        return f"static, {order.describe() if isinstance(order, Prior) else self._source}"


def _ascending(prior: Float[Tensor, " middle"], num_blocks: int) -> tuple[int, ...]:
    """The middle blocks in ascending order of their prior; ties: deeper first."""
    middle = max(0, num_blocks - 2)
    if len(prior) != middle:
        raise PolicyError(
            f"the prior has {len(prior)} entries and the model has {num_blocks} blocks: "
            f"expected {middle} entries, one for each block but the first and the last"
        )
    ascending = torch.argsort(prior, descending=True, stable=True).flip(0)
    return tuple(block + 1 for block in ascending.tolist())
