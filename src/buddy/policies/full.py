"""Full depth: every block is pinned, so any smaller budget is refused."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.policy import BatchSize, Observation, PolicyResources
from buddy.errors import PolicyError


class FullPolicy:
    """Every block is worth the same."""

    name = "full"
    context_layer = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pinned = range(num_blocks)

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "FullPolicy":
        """Make it from `full`, which takes no argument."""
        if argument:
            raise PolicyError(f"policy full takes no argument, got {argument!r}")
        return cls(resources.num_blocks)

    def observe(self, state: Any, seen: Observation) -> BatchSize:
        """Nothing but the batch size matters."""
        return BatchSize.of(seen)

    def scores(
        self, state: BatchSize, blocks: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch blocks"]:
        """All zero."""
        return torch.zeros(state.rows, self.num_blocks, device=state.device)

    def describe(self) -> str:
        """As shown in a summary line."""
        return "full depth"
