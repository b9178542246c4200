"""Router: KV-aware Planner and Decision Module together, one per model and checkpoint."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.budget.blocks import MIN_BLOCKS
from buddy.depth.policy import Observation
from buddy.errors import PolicyError
from buddy.routing.decision import DecisionConfig, DecisionModule
from buddy.routing.planner import ContextState, PlannerConfig, read_context
from buddy.settings import Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Everything that fixes a router's shape and meaning; JSON in a checkpoint.

    Raises:
        PolicyError: The model has no block to choose, or not the one that is to be read.
    """

    num_blocks: Annotated[int, Range(high=1024)]
    """Blocks of the model."""
    token_width: Annotated[int, Range(1, 2**20)]
    """KV heads times head size."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """What is read, and how it is pooled."""
    decision: DecisionConfig = field(default_factory=DecisionConfig)
    """Size and weight of the prior."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        if self.num_blocks < MIN_BLOCKS:
            raise PolicyError(
                "a router chooses among the blocks between the first and the last, and a model of "
                f"{self.num_blocks} blocks has none to choose from: use it without a router"
            )
        if self.planner.context_layer > self.num_blocks:
            raise PolicyError(
                f"context_layer must be 1 to {self.num_blocks} in a model of as many blocks, "
                f"got {self.planner.context_layer}"
            )

    @property
    def summary_width(self) -> int:
        """Width of the summary that decisions are made from."""
        if self.planner.pool == "scores":
            return self.num_blocks - 2
        return self.planner.summary_width(self.token_width)

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)


class Router(nn.Module):
    """Observes the context layer's cache and scores the middle blocks, prior included."""

    def __init__(self, config: RouterConfig, prior: Float[Tensor, " middle"] | None = None) -> None:
        super().__init__()
        self.config = config
        width = config.planner.summary_width(config.token_width)
        self.decision = DecisionModule(width, config.num_blocks - 2, config.decision, prior)

    def observe(self, state: ContextState | None, seen: Observation) -> ContextState:
        """Take in new tokens."""
        planner = self.config.planner
        tokens = read_context(seen, planner.context)  # [B, T, W]
        if planner.pool == "scores":
            tokens = self.decision(tokens)  # [B, T, L - 2]
        state = ContextState.empty(tokens) if state is None else state
        return state.add(tokens, seen.router_sees, planner.decay)

    def summary(self, state: ContextState) -> Float[Tensor, "batch summary"]:
        """What decisions are made from: the pooled context, float32."""
        pooled = state.pooled()
        if self.config.planner.summary == "mean+last":
            return torch.cat([pooled, state.last.float()], dim=1)
        return pooled

    def scores(self, state: ContextState) -> Float[Tensor, "batch middle"]:
        """Fused scores of the middle blocks."""
        summary = self.summary(state)
        is_scored = self.config.planner.pool == "scores"
        return self.decision.fuse(summary if is_scored else self.decision(summary))
