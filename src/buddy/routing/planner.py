"""KV-aware Planner: the first block's keys and values, pooled as they arrive."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.depth.policy import Observation, TensorState
from buddy.depth.wide import widened, widest_float
from buddy.errors import PolicyError
from buddy.settings import Range, check_ranges

ContextSource = Literal["key", "value", "key+value"]
Summary = Literal["mean", "mean+last", "ema"]
Pool = Literal["tokens", "scores"]

MAX_CONTEXT_LAYER = 4
"""The deepest block that the paper reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerConfig:
    """What the planner reads and how it pools.

    Raises:
        PolicyError: An unknown setting, or two that exclude each other.
    """

    context: ContextSource = "value"
    """Keys (after rotary embedding), values, or their sum."""
    context_layer: Annotated[int, Range(1, MAX_CONTEXT_LAYER)] = 1
    """1-based block whose cache is read; blocks up to it always run and count."""
    summary: Summary = "mean"
    """Plain mean, mean and newest token side by side, or a recency-weighted mean."""
    pool: Pool = "tokens"
    """Pool tokens and score once (paper, 4.2.3), or score each token and pool the scores."""
    ema_decay: float = 0.98
    """Share of its weight that a token keeps with each newer one; `ema` only."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("context", ContextSource),
            ("summary", Summary),
            ("pool", Pool),
        ):
            if getattr(self, name) not in get_args(choices):
                raise PolicyError(
                    f"{name} must be one of {', '.join(get_args(choices))}, "
                    f"got {getattr(self, name)!r}"
                )
        check_ranges(self, PolicyError)
        if not 0 < self.ema_decay < 1:
            raise PolicyError(f"ema_decay must be between 0 and 1, got {self.ema_decay}")
        if self.pool == "scores" and self.summary == "mean+last":
            raise PolicyError('pool="scores" has no newest token to add: use summary="mean"')

    @property
    def decay(self) -> float:
        """Weight that a token keeps when a newer one arrives."""
        return self.ema_decay if self.summary == "ema" else 1.0

    def summary_width(self, token_width: int) -> int:
        """Width of the summary of tokens that are `token_width` wide."""
        return token_width * (2 if self.summary == "mean+last" else 1)


def token_weights(
    router_sees: Bool[Tensor, "batch tokens"], decay: float
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, " batch"]]:
    """What each new token weighs in a running sum, and what the sum before them keeps.

    Both are as wide as the device allows, and so are the exponents: torch gives a power of whole
    numbers in float32.
    """
    real = widened(router_sees)
    if decay == 1.0:
        return real, torch.ones_like(real[:, 0])
    if real.shape[1] == 1:  # a decode step: none is newer
        return real, decay ** real[:, 0]
    newer = real.flip(1).cumsum(1).flip(1) - real  # [B, T]
    return decay**newer * real, decay ** real.sum(1)


@dataclass(frozen=True, slots=True)
class ContextState(TensorState):
    """A running weighted sum of what was seen; one update is O(1) in the sequence's length.

    Sums are as wide as the device allows: where pads stand changes the order of a sum, and must
    not change a plan.
    """

    total: Float[Tensor, "batch width"]
    weight: Float[Tensor, " batch"]
    last: Float[Tensor, "batch width"]

    @classmethod
    def empty(cls, like: Float[Tensor, "batch tokens width"]) -> "ContextState":
        """Nothing seen yet."""
        zeros = torch.zeros_like(like[:, 0], dtype=widest_float(like.device))
        return cls(zeros, zeros[:, 0], zeros)

    def add(
        self,
        tokens: Float[Tensor, "batch tokens width"],
        router_sees: Bool[Tensor, "batch tokens"],
        decay: float,
    ) -> "ContextState":
        """The state after `tokens`; those not `router_sees` leave no trace."""
        tokens = widened(tokens)
        share, remains = token_weights(router_sees, decay)
        total = self.total * remains[:, None] + (tokens * share[..., None]).sum(1)
        weight = self.weight * remains + share.sum(1)
        place = torch.arange(1, router_sees.shape[1] + 1, device=router_sees.device)
        newest = (router_sees * place).argmax(1)  # [B], 0 where none is counted
        last = tokens[torch.arange(len(tokens), device=tokens.device), newest]
        return ContextState(
            total, weight, torch.where(router_sees.any(1)[:, None], last, self.last)
        )

    def pooled(self) -> Float[Tensor, "batch width"]:
        """The weighted mean, float32."""
        return (self.total / self.weight.clamp(min=1e-12)[:, None]).float()


def read_context(seen: Observation, source: ContextSource) -> Float[Tensor, "batch tokens width"]:
    """What the planner reads of each new token: K, V or K + V, float32."""
    if seen.keys is None or seen.values is None:
        raise PolicyError("this policy reads the KV cache, but was given none")
    if source == "key":
        return seen.keys.float()
    if source == "value":
        return seen.values.float()
    return seen.keys.float() + seen.values.float()
