"""FlexiDepth: in the last half of the blocks, tokens that skip one pass through a small adapter.

Source: FlexiDepth (2025) and a public re-implementation of it. As there, keys and values of skipped
tokens are computed, the MLP's output of a token that runs is weighed by its gate, and the adapter's
by one minus it. The form of the penalty, the square of a token's summed gates, is as recalled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

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

_SIXTEENTH: Final = 16
"""What the paper divides the model's widths by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexiDepthSettings(GateSizes):
    """Sizes of routers and adapters."""

    router_width: Annotated[int, Range(1, 2**16)]
    """Width of a router's hidden layer; the hidden size / 16 in the paper."""
    adapter_width: Annotated[int, Range(1, 2**20)]
    """Width of an adapter's hidden layer; the MLP's / 16 in the paper."""


class FlexiDepthPart(GatedPart):
    """A router and a SwiGLU adapter for each block of the last half."""

    policy = "flexidepth"
    settings = FlexiDepthSettings
    reads_mlp = True

    def __init__(self, config: FlexiDepthSettings) -> None:
        super().__init__(config)
        count, hidden = config.num_blocks - config.num_blocks // 2, config.hidden_size
        width, inner = config.router_width, config.adapter_width
        self.down = nn.Parameter(torch.randn(count, hidden, width) * 0.02)
        self.norm = nn.Parameter(torch.ones(count, width))
        self.up = nn.Parameter(torch.randn(count, width, hidden) * 0.02)
        self.score = nn.Parameter(torch.randn(count, hidden) * 0.02)
        self.bias = nn.Parameter(torch.full((count,), 2.0))  # all run at the start
        self.gate = nn.Parameter(torch.randn(count, hidden, inner) * 0.02)
        self.value = nn.Parameter(torch.randn(count, hidden, inner) * 0.02)
        self.out = nn.Parameter(torch.zeros(count, inner, hidden))  # adds nothing at the start

    @classmethod
    def sizes(cls, gates: Any, model: Any) -> dict[str, Any]:
        """Those of the paper: a sixteenth of the model's, one at least."""
        return {
            "router_width": max(1, model.hidden_size // _SIXTEENTH),
            "adapter_width": max(1, model.intermediate_size // _SIXTEENTH),
        }

    @property
    def governed(self) -> range:
        """The last half."""
        return range(self.config.num_blocks // 2, self.config.num_blocks)

    def _normed(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden.float(), (self.config.hidden_size,))

    def probability(self, block: int, hidden: Residual) -> PerToken:
        """A token's gate."""
        at = self.place(block)
        inner = self._normed(hidden) @ self.down[at]
        inner = torch.tanh(rms_norm(inner, (self.config.router_width,), self.norm[at]))
        return torch.sigmoid(inner @ self.up[at] @ self.score[at] + self.bias[at])

    def adapter(self, block: int, hidden: Residual) -> Residual:
        """What a token that skips the block adds, before its weight."""
        at, x = self.place(block), self._normed(hidden)
        return (silu(x @ self.gate[at]) * (x @ self.value[at])) @ self.out[at]

    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """The gate itself weighs either path, so it has its gradient from both."""
        gate = self.probability(block, hidden)
        return Gate(gate > 0.5, gate)

    def mix(
        self, block: int, before: Residual, after: Residual, gate: Gate, mlp: Residual | None
    ) -> Residual:
        """`x + attention + g MLP` for a token that runs, `x + (1 - g) adapter` for another."""
        assert mlp is not None
        rest = (1 - gate.weight)[..., None]
        run = after - (rest * mlp.float()).to(after.dtype)
        skip = before + (rest * self.adapter(block, before)).to(before.dtype)
        return torch.where(gate.keep[..., None], run, skip)

    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """The square of each token's summed gates, on average."""
        total = torch.stack([gate.weight for gate in gates]).sum(0)
        return mean_over_real(total.square(), seen)


class FlexiDepthPolicy(GatedPolicy):
    """Runs a block for the tokens whose gate is above a half."""

    name = "flexidepth"
    kind = FlexiDepthPart
    part: FlexiDepthPart

    def adjust_output(self, state: Any, block: int, before: LaneResidual, run: Any) -> LaneResidual:
        """Weigh the MLP of who ran, and pass the others through the adapter."""
        if self.threshold == 0:
            after: Tensor = run.hidden
            return after
        gate = Gate(state.keep, self.part.probability(block, before))
        return self.part.mix(block, before, run.hidden, gate, run.mlp)
