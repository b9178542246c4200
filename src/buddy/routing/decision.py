"""Decision Module: a summary of the context -> a score for each middle block, prior fused."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.errors import PolicyError
from buddy.routing.float32 import LowRank
from buddy.settings import Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionConfig:
    """Size of the Decision Module and weight of the prior."""

    rank: Annotated[int, Range(1, 2**16)] = 32
    """Width of the hidden layer."""
    omega: Annotated[float, Range(-1e6, 1e6)] = 0.1
    """Weight of the normalised prior in the fused score."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)


class DecisionModule(LowRank):
    """Scores each middle block by two linear layers; `omega` times the prior comes on top.

    The last layer starts at zero, so an untrained module ranks by its prior alone.

    Source: paper, section 4.2.1; the zero start is ours.
    """

    prior: Tensor

    def __init__(
        self,
        width: int,
        num_middle: int,
        config: DecisionConfig,
        prior: Float[Tensor, " middle"] | None = None,
    ) -> None:
        super().__init__(width, config.rank, num_middle)
        self.config = config
        prior = torch.zeros(num_middle) if prior is None else prior.detach().float().clone()
        if prior.shape != (num_middle,):
            raise PolicyError(
                f"the prior has {prior.numel()} entries, expected {num_middle}, "
                "one for each block but the first and the last"
            )
        self.register_buffer("prior", prior)

    def fuse(self, scores: Float[Tensor, "batch middle"]) -> Float[Tensor, "batch middle"]:
        """Add the prior: `s' = s + omega * p`."""
        return scores + self.config.omega * self.prior
