"""Mixture-of-Depths: at every second block, a fixed share of the tokens runs.

Source: Mixture-of-Depths (2024), whose code was never released. Top-k over a sequence is not
causal, so a predictor of each block, trained beside it, decides at inference, in prompts too. What
is ours: the weight of a block's result is twice a sigmoid, which is 1 at the start, because we
begin with a trained model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from buddy.depth.policy import LaneResidual, PerToken, Residual
from buddy.methods.gated.gates import (
    Gate,
    GatedPart,
    GatedPolicy,
    GateSizes,
    Pass,
    PerRow,
    Scalar,
    mean_over_real,
)
from buddy.settings import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOfDepthsSettings(GateSizes):
    """Sizes of the routers, and how many tokens they let through."""

    share: Annotated[float, Range(above=0, high=1)] = 0.125
    """Share of a sequence's tokens that run a gated block."""


class MixtureOfDepthsRouters(GatedPart):
    """A linear router and a linear predictor on the residual, at every second block.

    Tokens that skip a block are not seen by those that run it.
    """

    policy = "mixture-of-depths"
    settings = MixtureOfDepthsSettings
    reads = ("share",)
    leaves = "mask"

    def __init__(self, config: MixtureOfDepthsSettings) -> None:
        super().__init__(config)
        count, width = config.num_blocks // 2, config.hidden_size
        self.router = nn.Parameter(torch.randn(count, width) * 0.002)
        self.predictor = nn.Parameter(torch.zeros(count, width))
        self.bias = nn.Parameter(
            torch.full((count,), math.log(config.share / (1.001 - config.share)))
        )

    @classmethod
    def sizes(cls, gates: Any, model: Any) -> dict[str, Any]:
        """The share of tokens."""
        return {"share": gates.share}

    @property
    def governed(self) -> range:
        """The second, the fourth, and so on."""
        return range(1, self.config.num_blocks, 2)

    def weight(self, block: int, hidden: Residual) -> PerToken:
        """The factor of a block's result."""
        return 2 * torch.sigmoid(hidden.float() @ self.router[block // 2])

    def _odds(self, block: int, hidden: Tensor) -> Tensor:
        return hidden.detach().float() @ self.predictor[block // 2] + self.bias[block // 2]

    def probability(self, block: int, hidden: Residual) -> PerToken:
        """That a token is among those of highest weight, as the predictor says."""
        return torch.sigmoid(self._odds(block, hidden))

    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """The tokens of highest weight in their sequence; the predictor learns who they are."""
        weight = self.weight(block, hidden)
        ranked = weight.detach().masked_fill(~seen.is_real, -1).argsort(1, descending=True)
        place = torch.empty_like(ranked).scatter_(
            1, ranked, torch.arange(ranked.shape[1], device=ranked.device).expand_as(ranked)
        )
        room = (seen.is_real.sum(1) * self.config.share).ceil()
        keep = place < room[:, None]
        wrong = binary_cross_entropy_with_logits(
            self._odds(block, hidden), keep.float(), reduction="none"
        )
        return Gate(keep, weight * keep, mean_over_real(wrong, seen))

    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """The predictors' cross-entropy; the share of tokens is fixed."""
        return torch.stack([gate.extra for gate in gates if gate.extra is not None]).mean()


class MixtureOfDepthsPolicy(GatedPolicy):
    """Runs a gated block for the tokens whose predictor says so, and weighs its result."""

    name = "mixture-of-depths"
    kind = MixtureOfDepthsRouters
    part: MixtureOfDepthsRouters

    def adjust_output(self, state: Any, block: int, before: LaneResidual, run: Any) -> LaneResidual:
        """`x + r f(x)`; of tokens that skip the block, f is zero."""
        weight = self.part.weight(block, before)[:, None].to(before.dtype)
        mixed: Tensor = before + weight * (run.hidden - before)
        return mixed
