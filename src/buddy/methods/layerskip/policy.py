"""LayerSkip: an exit at a fixed block. Under a budget of n blocks the first n run."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.policy import BatchSize, Observation, PolicyResources
from buddy.errors import PolicyError


class LayerSkipPolicy:
    """The shallower a block, the sooner it is kept, so any budget is an exit.

    Source: LayerSkip (Elhoushi et al., 2024). Its adapters are trained by
    `training.exits.layerskip`; the policy itself learns nothing and serves any model.
    """

    name = "layerskip"
    context_layer = 0
    pinned = (0,)
    exits: ClassVar[bool] = True

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "LayerSkipPolicy":
        """Make it from `layerskip`, which takes no argument: the budget is the exit."""
        if argument:
            raise PolicyError(
                f"policy layerskip takes no argument, got {argument[:80]!r}: its exit is the "
                'budget, as in --budget "12 blocks"'
            )
        return cls(resources.num_blocks)

    def observe(self, state: Any, seen: Observation) -> BatchSize:
        """Nothing but the batch size matters."""
        return BatchSize.of(seen)

    def scores(
        self, state: BatchSize, blocks: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch blocks"]:
        """Minus the block's place."""
        places = torch.arange(self.num_blocks, device=state.device)
        return -places.float().expand(state.rows, -1)

    def describe(self) -> str:
        """As shown in a summary line."""
        return "early exit"
