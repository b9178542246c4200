"""DASH: skipping as a decision process over the states between blocks.

Source: DASH (2025), of which the abstract alone was at hand: skipping is a Markov decision
process over intermediate states, what a skipped block would have done is compensated for, and the
next block is scored while the present one runs. How each is done here is ours: an action's odds are
linear in the state that entered the gated block before, compensation is a scale and a shift of each
channel, and actions are learned by policy gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, rms_norm

from buddy.depth.policy import LaneMask, LaneResidual, PerToken, Residual
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


class DashPart(GatedPart):
    """A scorer and a compensation for each block but the first and the last.

    A block's scorer reads the state that entered the block before it, so it can run beside that
    block.
    """

    policy = "dash"
    reads = ("target",)

    def __init__(self, config: GateSizes) -> None:
        super().__init__(config)
        count, hidden = config.num_blocks - 2, config.hidden_size
        self.score = nn.Parameter(torch.zeros(count, hidden))
        self.bias = nn.Parameter(torch.full((count,), 2.0))
        self.scale = nn.Parameter(torch.zeros(count, hidden))
        self.shift = nn.Parameter(torch.zeros(count, hidden))
        self._earlier: Tensor | None = None

    @property
    def governed(self) -> range:
        """All but the first and the last."""
        return range(1, self.config.num_blocks - 1)

    def odds(self, block: int, earlier: Residual) -> PerToken:
        """Logit of running a block, from the state that entered the block before."""
        state = rms_norm(earlier.float(), (self.config.hidden_size,))
        return state @ self.score[block - 1] + self.bias[block - 1]

    def probability(self, block: int, hidden: Residual) -> PerToken:
        """That a token runs a block, from the state that entered the block before."""
        return torch.sigmoid(self.odds(block, hidden))

    def compensated(self, block: int, hidden: Residual) -> Residual:
        """The residual of a token that skips a block."""
        wide = hidden.float()
        return (wide + self.scale[block - 1] * wide + self.shift[block - 1]).to(hidden.dtype)

    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """A sampled action; its log-probability goes along, for the policy gradient."""
        earlier = hidden if block == 1 or self._earlier is None else self._earlier
        self._earlier = hidden.detach()
        odds = self.odds(block, earlier.detach())
        keep = seen.uniform() < torch.sigmoid(odds)
        return Gate(keep, torch.where(keep, logsigmoid(odds), logsigmoid(-odds)))

    def mix(
        self, block: int, before: Residual, after: Residual, gate: Gate, mlp: Residual | None
    ) -> Residual:
        """The block's result, or the compensated residual."""
        return torch.where(gate.keep[..., None], after, self.compensated(block, before))

    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """The policy gradient of the loss, and how far the expected share is from the target.

        The reward of a row's actions is minus its loss; the advantage is the reward, normalised
        over the batch. The expected share needs no sampling.
        """
        rows = seen.total(losses.new_tensor(float(len(losses))))
        keep = torch.stack([gate.keep for gate in gates])  # [gated, B, T]
        log_prob = torch.stack([gate.weight for gate in gates])
        reward = -losses.detach()
        centred = reward - seen.total(reward.sum()) / rows
        deviation = (seen.total(centred.square().sum()) / rows).sqrt()
        advantage = centred / (deviation + 1e-6)
        real = seen.is_real.float()
        by_row = (log_prob.mean(0) * real).sum(1) / real.sum(1)
        runs = torch.where(keep, log_prob.exp(), 1 - log_prob.exp())
        gain = seen.total((advantage * by_row).sum()) / rows
        return (mean_over_real(runs.mean(0), seen) - target).abs() - gain


class DashPolicy(GatedPolicy):
    """Decides about a block from the state that entered the gated block before it."""

    name = "dash"
    kind = DashPart
    part: DashPart

    def probability(self, state: Any, block: int, hidden: Residual) -> Float[Tensor, " lanes"]:
        """That each lane runs a block, by the state of one block earlier; the first has none."""
        earlier = hidden if state.earlier is None else state.earlier
        state.earlier = hidden
        return self.part.probability(block, earlier)

    def adjust_output(self, state: Any, block: int, before: LaneResidual, run: Any) -> LaneResidual:
        """Compensate who skipped."""
        keep: LaneMask = state.keep
        return torch.where(keep[:, None], run.hidden, self.part.compensated(block, before))
