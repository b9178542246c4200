"""Full depth: every block is pinned, so any smaller budget is refused."""

import torch

from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, RowBudgets


class FullPolicy(DepthPolicy):
    """Every block is worth the same."""

    name = "full"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.pinned = range(num_blocks)

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """All zero."""
        return torch.zeros(state.rows, self.num_blocks, device=state.device)

    def describe(self) -> str:
        """A few words for a summary line."""
        return "full depth"
