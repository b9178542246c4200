"""Causal attention for training on a CPU: plain matrix products, no fused kernel.

PyTorch's fused CPU kernel takes four times as long, forward and backward, for sequences as short
as instruction data. Queries may come side by side, without the pads of their rectangle.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from buddy.backbone.backbone import Backbone

_NAME: Final = "buddy_grouped"
_LONGEST: Final = 512
"""Tokens beyond which whole score matrices would fill the memory."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Tokens of a rectangle that count, side by side, and some more to fill up.

    Attributes:
        lanes: Of the pass.
        places: In the rectangle, row by row.
        positions: In their sequences.
        num_real: Tokens that count; those that fill up follow.
        shape: Of the rectangle.
    """

    lanes: Int[Tensor, " tokens"]
    places: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    num_real: int
    shape: tuple[int, int]

    def spread(self, values: Shaped[Tensor, "tokens ..."]) -> Shaped[Tensor, "rows width ..."]:
        """Values by place of the rectangle; zero at pads."""
        real = slice(self.num_real)
        laid = values.new_zeros(math.prod(self.shape), *values.shape[1:])
        laid = laid.index_copy(0, self.places[real], values[real])
        return laid.view(*self.shape, *values.shape[1:])

    def collect(self, values: Shaped[Tensor, "rows width ..."]) -> Shaped[Tensor, "tokens ..."]:
        """Values by token."""
        return values.flatten(0, 1).index_select(0, self.places)


_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)


@contextmanager
def packed(packing: Packing) -> Iterator[None]:
    """Take queries as [1, heads, tokens, head], and keys, values and mask as rectangles."""
    token = _packing.set(packing)
    try:
        yield
    finally:
        _packing.reset(token)


def packed_attention(
    module: Any, query: Float[Tensor, "batch heads tokens head"], *rest: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention as in `grouped_attention`, of queries that come side by side within `packed`."""
    packing = _packing.get()
    if packing is None:
        return grouped_attention(module, query, *rest, **options)
    laid = packing.spread(query[0].transpose(0, 1)).transpose(1, 2)
    out, _ = grouped_attention(module, laid, *rest, **options)
    return packing.collect(out)[None], None


def grouped_attention(
    module: Any,
    query: Float[Tensor, "batch heads tokens head"],
    key: Float[Tensor, "batch kv_heads slots head"],
    value: Float[Tensor, "batch kv_heads slots head"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; the query heads of a group share one product."""
    batch, heads, tokens, width = query.shape
    slots = key.shape[2]
    is_plain = attention_mask is None and slots == tokens
    if slots > _LONGEST or not (is_plain or attention_mask is not None):
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return out, None
    groups = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    stacked = (query * scale).reshape(batch, key.shape[1], groups * tokens, width)
    scores = (stacked @ key.transpose(2, 3)).view(batch, heads, tokens, slots)
    if attention_mask is None:
        unseen = torch.ones(tokens, slots, dtype=torch.bool, device=query.device).triu(1)
    else:
        unseen = ~attention_mask
    weights = torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1)
    out = weights.view(batch, key.shape[1], groups * tokens, slots) @ value
    return out.view(batch, heads, tokens, width).transpose(1, 2).contiguous(), None


def is_grouped(backbone: Backbone) -> bool:
    """Whether it attends by `packed_attention` now."""
    return bool(backbone.config._attn_implementation == _NAME)


@contextmanager
def fast_attention(backbone: Backbone) -> Iterator[None]:
    """Let the backbone attend by `packed_attention`, where that is faster, within the context."""
    config = backbone.config
    if backbone.device.type != "cpu" or config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(_NAME, packed_attention)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
