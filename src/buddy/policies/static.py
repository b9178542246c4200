"""Static pruning: one removal order for every input."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.policy import BatchSize, Observation, PolicyResources
from buddy.errors import PolicyError, shown
from buddy.policies.measured import read_order


class StaticPolicy:
    """Blocks go in a given order, the first named first; blocks not named never go.

    Args:
        removal_order: 0-based blocks, least important first. It may be as short as the one set
            of blocks that a method removes; then a smaller budget is refused.
        num_blocks: Blocks of the model.
        source: Where the order comes from, for summary lines.

    Raises:
        PolicyError: A block is named twice, or does not exist.
    """

    name = "static"
    context_layer = 0

    def __init__(
        self, removal_order: Sequence[int], num_blocks: int, *, source: str = "given order"
    ) -> None:
        order = list(removal_order)
        if len(set(order)) != len(order) or not all(0 <= block < num_blocks for block in order):
            raise PolicyError(
                f"a removal order names each block once, from 0 to {num_blocks - 1}, got "
                f"{shown(order)}"
            )
        self.num_blocks = num_blocks
        self.removal_order = tuple(order)
        self.source = source
        self.pinned = tuple(block for block in range(num_blocks) if block not in set(order))
        self._scores = torch.zeros(num_blocks)
        self._scores[order] = torch.arange(1.0, len(order) + 1)

    @classmethod
    def from_prior(
        cls, prior: Float[Tensor, " middle"], num_blocks: int, source: str = "prior"
    ) -> "StaticPolicy":
        """Remove the middle blocks in ascending order of their prior; ties: deeper first.

        Raises:
            PolicyError: The prior has not one entry for each middle block.
        """
        middle = max(0, num_blocks - 2)
        if len(prior) != middle:
            raise PolicyError(
                f"the prior has {len(prior)} entries and the model has {num_blocks} blocks: "
                f"expected {middle} entries, one for each block but the first and the last"
            )
        ascending = torch.argsort(prior, descending=True, stable=True).flip(0)
        return cls([block + 1 for block in ascending.tolist()], num_blocks, source=source)

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "StaticPolicy":
        """Make it from `static` (the model's prior), `static:12,11,20` or `static:RECORD.json`.

        A record is what `buddy importance` writes.
        """
        if not argument:
            if resources.prior is None:
                raise PolicyError(
                    "this model has no measured prior to order its blocks by: name the blocks to "
                    "remove, as in --policy static:12,11,20, measure them with buddy importance, "
                    "or use --policy random"
                )
            return cls.from_prior(resources.prior, resources.num_blocks)
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

    def observe(self, state: Any, seen: Observation) -> BatchSize:
        """Nothing but the batch size matters."""
        return BatchSize.of(seen)

    def scores(
        self, state: BatchSize, blocks: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch blocks"]:
        """Place in the removal order: the later, the higher."""
        return self._scores.to(state.device).expand(state.rows, -1)

    def describe(self) -> str:
        """As shown in a summary line."""
        return f"static, {self.source}"
