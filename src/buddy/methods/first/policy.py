"""FiRST: a router at each block, whose mean over the prompt says which blocks run.

Source: FiRST (2024), of which the abstract was at hand; coefficients and thresholds are as
recalled. What is ours: the first and the last block always run, and `first:strict`, which keeps a
budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from buddy.depth.policy import (
    BlockScores,
    DepthPolicy,
    LaneMask,
    LaneResidual,
    Observation,
    PerToken,
    Policy,
    PolicyResources,
    Residual,
    RowBudgets,
    TensorState,
    check_state,
)
from buddy.methods.gated.gates import (
    Gate,
    GatedPart,
    GatedPolicy,
    GateSizes,
    Pass,
    PerRow,
    Scalar,
    mean_over_real,
    need_gates,
    share_run,
)


class FirstRouters(GatedPart):
    """Linear and sigmoid on the residual, one for each block but the first and the last.

    Trained in two stages. First the base model is frozen, a block's output is mixed with its input
    by the probability, and a penalty is on the mean probability. Then the routers are frozen, the
    mask of the prompt is hard, and LoRA is trained under it.
    """

    policy = "first"
    reads = ("gate_steps",)

    def __init__(self, config: GateSizes) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.zeros(config.num_blocks - 2, config.hidden_size))
        self.bias = nn.Parameter(torch.full((config.num_blocks - 2,), 2.0))  # all run at the start

    @property
    def governed(self) -> range:
        """All but the first and the last."""
        return range(1, self.config.num_blocks - 1)

    def probability(self, block: int, hidden: Residual) -> PerToken:
        """That a token runs a block."""
        place = block - 1
        return torch.sigmoid(hidden.float() @ self.weight[place] + self.bias[place])

    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """The probability itself; once the adapters' turn has come, the mask of the prompt."""
        probability = self.probability(block, hidden)
        if not seen.adapts:
            return Gate(torch.ones_like(seen.is_real), probability)
        mean = (probability * seen.is_prompt).sum(1) / seen.is_prompt.sum(1)
        keep = (mean > 0.5)[:, None].expand(seen.is_real.shape)
        return Gate(keep, keep.float())

    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """The mean probability over tokens and blocks."""
        return mean_over_real(share_run(gates), seen)


class FirstPolicy(GatedPolicy):
    """The published rule: the mean over the prompt decides, and decoding keeps the mask."""

    name = "first"
    kind = FirstRouters

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> Policy:
        """Make it from `first`, `first:THRESHOLD` or `first:strict`."""
        if argument == "strict":
            part = need_gates(FirstRouters, resources)
            return StrictFirstPolicy(part, resources.backbone)
        return super().from_spec(argument, resources)

    def keep(self, state: Any, block: int, hidden: LaneResidual) -> LaneMask:
        """One decision for all lanes of a sequence; an older sequence goes on with its mask."""
        new = state.new
        counts = len(new.last_runs)
        probability = self.part.probability(block, hidden) * new.router_sees
        total = probability.new_zeros(counts).index_add(0, new.sequence, probability)
        seen = total.new_zeros(counts).index_add(0, new.sequence, new.router_sees.float())
        keep = (total > self.threshold * seen) | (seen == 0)
        if self.threshold == 0:
            keep = torch.ones_like(keep)
        for place, runs in enumerate(new.last_runs):
            if runs is not None:
                keep[place] = bool(runs[block])
        by_lane: Tensor = keep[new.sequence]
        return by_lane


@dataclass(frozen=True, slots=True)
class MeanProbabilities(TensorState):
    """The mean probabilities over each sequence's prompt, by gated block."""

    mean: Float[Tensor, "batch gated"]


class StrictFirstPolicy(DepthPolicy):
    """The budget is spent on the blocks of highest mean probability: budget strict, and ours.

    The probabilities are those of the dense model, so a prompt costs one more pass at full depth.

    Args:
        part: The routers.
        backbone: The model that they were trained on.
    """

    name = "first"

    def __init__(self, part: FirstRouters, backbone: Any) -> None:
        super().__init__(part.config.num_blocks)
        self.part, self.backbone = part, backbone

    @torch.no_grad()
    def observe(self, state: Any, seen: Observation) -> MeanProbabilities:
        """Run a prompt at full depth; what comes later changes nothing."""
        check_state(state, MeanProbabilities, self.name)
        if isinstance(state, MeanProbabilities):
            return state
        rows = [
            self._means(ids[sees])
            for ids, sees in zip(seen.token_ids, seen.router_sees, strict=True)
        ]
        return MeanProbabilities(torch.stack(rows))

    def _means(self, token_ids: Int[Tensor, " tokens"]) -> Float[Tensor, " gated"]:
        backbone = self.backbone
        if len(token_ids) == 0:  # the route may see nothing: all blocks are alike
            return torch.zeros(self.num_blocks - 2, device=token_ids.device)
        hidden = backbone.embed(token_ids[None])
        positions = torch.arange(len(token_ids), device=token_ids.device)[None]
        rotary = backbone.rotary(hidden, positions)
        distance = positions[0][:, None] - positions[0]
        means = []
        for block in range(self.num_blocks - 1):
            if block in self.part.governed:
                means.append(self.part.probability(block, hidden[0]).mean())
            window = backbone.windows[block]
            sees = (distance >= 0) & (distance < (window or len(token_ids)))
            hidden = backbone.run_block(block, hidden, sees[None, None], positions, rotary, None)
        return torch.stack(means)

    def scores(self, state: MeanProbabilities, blocks: RowBudgets) -> BlockScores:
        """The mean probability over the prompt."""
        return nn.functional.pad(state.mean, (1, 1))

    def describe(self) -> str:
        """A few words for a summary line."""
        return "first, top-k of the mean probabilities"
