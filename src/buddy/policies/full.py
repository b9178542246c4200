"""Full depth: every block is pinned, so any smaller budget is refused."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.policy import BatchSize, DepthPolicy


class FullPolicy(DepthPolicy):
    """Every block is worth the same."""

    name = "full"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.pinned = range(num_blocks)

    def scores(
        self, state: BatchSize, blocks: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch blocks"]:
        """All zero."""
        return torch.zeros(state.rows, self.num_blocks, device=state.device)

    def describe(self) -> str:
        """A few words for a summary line."""
        return "full depth"
