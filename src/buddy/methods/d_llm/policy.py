"""D-LLM: each token decides at each block, and a token that skips a block is not seen there.

Source: D-LLM (2024) and its released code, whose sizes, start and loss these are. As there, keys of
skipped tokens are masked in training and inference, and the first two tokens run everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from buddy.depth.policy import PerToken, Residual
from buddy.methods.gated.gates import (
    Gate,
    GatedPart,
    GatedPolicy,
    GateSizes,
    Pass,
    PerRow,
    Scalar,
    mean_over_real,
    share_run,
    straight_through,
)
from buddy.settings import Range

_FIRST_BLOCK = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DLLMSettings(GateSizes):
    """Sizes of the routers."""

    width: Annotated[int, Range(1, 2**16)] = 512
    """Width of a router's hidden layer."""


class DLLMRouters(GatedPart):
    """Linear, RMSNorm, SiLU and Linear on the residual, for each block from the third on.

    Trained by a hard Gumbel-softmax with straight-through gradients; blocks are computed for all
    tokens meanwhile.
    """

    policy = "d-llm"
    settings = DLLMSettings
    reads = ("target", "width")
    leaves = "mask"
    sure_tokens = 2

    def __init__(self, config: DLLMSettings) -> None:
        super().__init__(config)
        count, width = config.num_blocks - _FIRST_BLOCK, config.width
        self.down = nn.Parameter(torch.randn(count, config.hidden_size, width) * 0.02)
        self.norm = nn.Parameter(torch.ones(count, width))
        self.up = nn.Parameter(torch.randn(count, width, 2) * 0.02)
        self.bias = nn.Parameter(torch.tensor([0.1, 2.0]).repeat(count, 1))  # skip, run

    @classmethod
    def sizes(cls, gates: Any, model: Any) -> dict[str, Any]:
        """The width of a router's hidden layer."""
        return {"width": gates.width}

    @property
    def governed(self) -> range:
        """The third block and all after it."""
        return range(_FIRST_BLOCK, self.config.num_blocks)

    def _odds(self, block: int, hidden: Tensor) -> Tensor:
        """Logit of running a block."""
        place = block - _FIRST_BLOCK
        inner = rms_norm(hidden.float() @ self.down[place], (self.config.width,), self.norm[place])
        skip_run = silu(inner) @ self.up[place] + self.bias[place]
        return skip_run[..., 1] - skip_run[..., 0]

    def probability(self, block: int, hidden: Residual) -> PerToken:
        """That a token runs a block."""
        return torch.sigmoid(self._odds(block, hidden))

    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """A Gumbel-softmax of two classes is a sigmoid with logistic noise; temperature 1."""
        uniform = seen.uniform()
        soft = torch.sigmoid(self._odds(block, hidden) + uniform.logit())
        sure = seen.position < self.sure_tokens
        soft = torch.where(sure, torch.ones_like(soft), soft)
        hard = soft > 0.5
        return Gate(hard, straight_through(hard, soft))

    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """How far each token's share of blocks is from the target, on average."""
        return mean_over_real((share_run(gates) - target).abs(), seen)


class DLLMPolicy(GatedPolicy):
    """Runs a block for the tokens whose router says so."""

    name = "d-llm"
    kind = DLLMRouters
