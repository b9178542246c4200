"""Budget Predictor: a summary of the prompt -> a distribution over budgets."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.errors import PolicyError
from buddy.routing.float32 import LowRank
from buddy.routing.measured_constant import MeasuredConstant
from buddy.routing.router import RouterConfig
from buddy.settings import Range, check_ranges

NUM_PINNED: Final = 2
"""Blocks that run besides the `k` that are chosen: the first and the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPredictorConfig:
    """Size of the Budget Predictor; JSON in a checkpoint."""

    rank: Annotated[int, Range(1, 2**16)] = 32
    """Width of the hidden layer."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)


class BudgetPredictor(LowRank):
    """Linear, SiLU, Linear: a logit for each number of middle blocks, `k` in 1 ... blocks - 2.

    It reads the summary that the router reads, so it is made for one. A `k` that the router's
    pinned blocks alone exceed has a logit of minus infinity. The last layer starts at zero, so an
    untrained predictor holds all budgets for alike.

    Args:
        router: Config of the router whose summary it reads.
        config: Its size.

    Attributes:
        constant: What it was measured against; None where it was not.

    Source: paper (Budget Predictor); the zero start and the mask are ours.
    """

    def __init__(self, router: RouterConfig, config: BudgetPredictorConfig | None = None) -> None:
        config = config or BudgetPredictorConfig()
        super().__init__(router.summary_width, config.rank, router.num_blocks - NUM_PINNED)
        self.config = config
        self.constant: MeasuredConstant | None = None
        self.router_config = router
        self.num_blocks = router.num_blocks
        # Blocks up to the context layer, and the last block, run whatever is chosen.
        self.lowest = max(router.planner.context_layer + 1, NUM_PINNED + 1)
        if self.lowest > self.num_blocks:
            raise PolicyError(
                f"all {self.num_blocks} blocks are pinned by context_layer "
                f"{router.planner.context_layer}: there is no budget to predict"
            )

    def forward(self, summary: Float[Tensor, "batch summary"]) -> Float[Tensor, "batch middle"]:
        """Logits over `k`, the first for k = 1."""
        logits = super().forward(summary)
        impossible = self.lowest - NUM_PINNED - 1
        return torch.cat(
            [torch.full_like(logits[:, :impossible], -torch.inf), logits[:, impossible:]], 1
        )

    @torch.no_grad()
    def choose(self, summary: Float[Tensor, "batch summary"]) -> Int[Tensor, " batch"]:
        """The likeliest number of blocks, first and last included; ties go to the fewer.

        Raises:
            PolicyError: A logit is NaN.
        """
        logits = self(summary)
        if bool(logits.isnan().any()):
            raise PolicyError(
                "a budget's logit is NaN, so none can be chosen: the predictor's weights or its "
                "input are broken; name a budget, or load another checkpoint"
            )
        k = logits.argmax(1) + 1  # the first of equals
        return cast(Tensor, k + NUM_PINNED)
