"""Decision Module: a summary of the context -> a score for each middle block, prior fused."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.errors import PolicyError
from buddy.routing.float32 import Float32Module
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


class DecisionModule(Float32Module):
    """Linear, SiLU, Linear, in float32 whatever the model's dtype, plus `omega` times the prior.

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
        super().__init__()
        self.config = config
        self.down = nn.Linear(width, config.rank, dtype=torch.float32)
        self.up = nn.Linear(config.rank, num_middle, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        prior = torch.zeros(num_middle) if prior is None else prior.detach().float().clone()
        if prior.shape != (num_middle,):
            raise PolicyError(
                f"the prior has {prior.numel()} entries, expected {num_middle}, "
                "one for each block but the first and the last"
            )
        self.register_buffer("prior", prior)

    def forward(self, summary: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch middle"]:
        """Score each middle block without the prior."""
        # Not under autocast either: one ulp of a score can change a plan.
        with torch.autocast(summary.device.type, enabled=False):
            scores: Tensor = self.up(nn.functional.silu(self.down(summary.float())))
        return scores

    def fuse(self, scores: Float[Tensor, "batch middle"]) -> Float[Tensor, "batch middle"]:
        """Add the prior: `s' = s + omega * p`."""
        return scores + self.config.omega * self.prior
