"""LayerSkip: an exit at a fixed block. Under a budget of n blocks the first n run."""

import torch

from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, PolicyResources, RowBudgets
from buddy.errors import PolicyError


class LayerSkipPolicy(DepthPolicy):
    """The shallower a block, the sooner it is kept, so any budget is an exit.

    Source: LayerSkip (Elhoushi et al., 2024). Its adapters are trained by
    `run`; the policy itself learns nothing and serves any model.
    """

    name = "layerskip"
    pinned = (0,)
    exits = True

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "LayerSkipPolicy":
        """Make it from `layerskip`, which takes no argument: the budget is the exit."""
        if argument:
            raise PolicyError(
                f"policy layerskip takes no argument, got {argument[:80]!r}: its exit is the "
                'budget, as in --budget "12 blocks"'
            )
        return cls(resources.num_blocks)

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """Minus the block's place."""
        places = torch.arange(self.num_blocks, device=state.device)
        return -places.float().expand(state.rows, -1)

    def describe(self) -> str:
        """A few words for a summary line."""
        return "early exit"
