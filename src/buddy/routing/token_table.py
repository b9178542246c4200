"""Token table: what each token adds to a router's state, known before any block has run.

The first block's values see neither position nor other tokens, and pooling commutes with the
Decision Module's first layer. So one table lookup and `r` additions a token take the place of
reading the cache, and a plan is known from token ids alone.

Source: method.md, section 2; ours.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.policy import TensorState
from buddy.depth.wide import widened, widest_float
from buddy.routing.planner import ContextState, PlannerConfig, token_weights
from buddy.routing.router import Router


def is_tabulable(planner: PlannerConfig) -> bool:
    """Whether a table can stand for the planner: values of the first block, pooled as tokens."""
    return (
        planner.context == "value"
        and planner.context_layer == 1
        and planner.pool == "tokens"
        and planner.summary != "mean+last"
    )


@dataclass(frozen=True, slots=True)
class TableState(TensorState):
    """A running weighted sum of table rows: `r` floats and a weight for each sequence."""

    total: Float[Tensor, "batch rank"]
    weight: Float[Tensor, " batch"]


class TokenTable:
    """A router's first layer, applied to every token's value in advance.

    Args:
        router: Its weights must not change while the table is in use.
        values: The first block's value of every token.
    """

    def __init__(self, router: Router, values: Float[Tensor, "vocab width"]) -> None:
        assert is_tabulable(router.config.planner)
        self.router = router
        with torch.no_grad(), torch.autocast(values.device.type, enabled=False):
            self.rows = torch.nn.functional.linear(values.float(), router.decision.down.weight)
        decision = router.decision
        self._on_host: tuple[NDArray[np.float32], ...] | None = None
        if self.rows.device.type == "cpu":
            parts = (decision.down.bias, decision.up.weight.T, decision.up.bias)
            first, second, offset = (part.detach().numpy() for part in parts)
            prior = np.float32(decision.config.omega) * decision.prior.numpy()
            self._on_host = self.rows.numpy(), first, second, offset + prior

    def observe(
        self,
        state: ContextState | TableState | None,
        token_ids: Int[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> TableState:
        """Take in new tokens; a state that was read from the cache is carried over."""
        if state is None:
            wide = widest_float(self.rows.device)
            zeros = self.rows.new_zeros(len(token_ids), self.rows.shape[1], dtype=wide)
            state = TableState(zeros, zeros[:, 0])
        elif isinstance(state, ContextState):
            weight = widened(self.router.decision.down.weight)
            state = TableState(state.total @ weight.T, state.weight)
        is_even = token_ids.shape[1] == 1 or self.router.config.planner.decay == 1.0
        if is_even and self._on_host is not None:
            return self._observe_on_host(self._on_host[0], state, token_ids, router_sees)
        share, remains = token_weights(router_sees, self.router.config.planner.decay)
        rows = widened(self.rows[token_ids])  # [B, T, r]
        total = state.total * remains[:, None] + (rows * share[..., None]).sum(1)
        return TableState(total, state.weight * remains + share.sum(1))

    def _observe_on_host(
        self,
        table: NDArray[np.float32],
        state: TableState,
        token_ids: Int[Tensor, "batch tokens"],
        router_sees: Bool[Tensor, "batch tokens"],
    ) -> TableState:
        """Take in one token of each row, or several that all weigh the same.

        The weights that a step reads drive all else out of the processor's caches, so what counts
        between two steps is how much code is called: numpy calls less than torch.
        """
        total, weight = state.total.numpy(), state.weight.numpy()
        seen = router_sees.numpy()
        rows = table[token_ids.numpy()] * seen[..., None]
        decay = self.router.config.planner.decay
        if decay != 1.0:
            remains = np.where(seen[:, 0], decay, 1.0)
            total, weight = total * remains[:, None], weight * remains
        total = total + rows.sum(1, dtype=np.float64)
        return TableState(torch.from_numpy(total), torch.from_numpy(weight + seen.sum(1)))

    def scores(self, state: TableState) -> Float[Tensor, "batch middle"]:
        """Fused scores of the middle blocks."""
        decision = self.router.decision
        if self._on_host is not None:
            _, first, second, offset = self._on_host
            weight = np.maximum(state.weight.numpy(), 1e-12)[:, None]
            x = (state.total.numpy() / weight).astype(np.float32) + first
            e = np.exp(-np.abs(x))
            inner = x * np.where(x < 0, e, np.float32(1)) / (1 + e)  # SiLU
            return torch.from_numpy(inner @ second + offset)
        pooled = (state.total / state.weight.clamp(min=1e-12)[:, None]).float()
        inner = torch.nn.functional.silu(pooled + decision.down.bias)
        return decision.fuse(decision.up(inner))
