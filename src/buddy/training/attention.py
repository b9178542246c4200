"""Causal attention for training: queries may come side by side, without pads of a rectangle.

On a CPU it is plain matrix products, as PyTorch's fused kernel takes four times as long there,
forward and backward, for sequences as short as instruction data. On a GPU it is PyTorch's own.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from buddy.backbone.backbone import Backbone
from buddy.training.varlen import takes_varlen, varlen_attention

_NAMES: Final = {"cpu": "buddy_grouped", "cuda": "buddy_packed"}
"""Attention functions by the device of the backbone."""
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
        ends: As `varlen_attention` takes them, what fills up as a sequence of its own; None where
            that is not used.
    """

    lanes: Int[Tensor, " tokens"]
    places: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    num_real: int
    shape: tuple[int, int]
    ends: Int[Tensor, " ends"] | None = None

    @property
    def longest(self) -> int:
        """No sequence of `ends` has more tokens."""
        return max(self.shape[1], len(self.places) - self.num_real)

    def spread(self, values: Shaped[Tensor, "tokens ..."]) -> Shaped[Tensor, "rows width ..."]:
        """Values by place of the rectangle; zero at pads."""
        real = slice(self.num_real)
        laid = values.new_zeros(math.prod(self.shape), *values.shape[1:])
        laid = laid.index_copy(0, self.places[real], values[real])
        return laid.view(*self.shape, *values.shape[1:])

    def collect(self, values: Shaped[Tensor, "rows width ..."]) -> Shaped[Tensor, "tokens ..."]:
        """Values by token."""
        return values.flatten(0, 1).index_select(0, self.places)


_packing: ContextVar[tuple[Packing, bool] | None] = ContextVar("packing", default=None)


@contextmanager
def packed(packing: Packing, *, is_flat: bool) -> Iterator[None]:
    """Take queries as [1, heads, tokens, head] within the context.

    Args:
        packing: Of the tokens.
        is_flat: Keys and values come so too, of the same tokens; else as rectangles, with a mask.
    """
    token = _packing.set((packing, is_flat))
    try:
        yield
    finally:
        _packing.reset(token)


def packed_attention(
    attend: Callable[..., tuple[Tensor, None]],
    module: Any,
    query: Float[Tensor, "batch heads tokens head"],
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as by `attend`, of queries that come side by side within `packed`."""
    found, options = _packing.get(), {**options, "scaling": scaling}
    if found is None:
        return attend(module, query, key, value, attention_mask, **options)
    packing, is_flat = found
    if is_flat:
        assert packing.ends is not None
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = varlen_attention(query, key, value, packing.ends, packing.longest, scaling)
        return out[None], None
    laid = packing.spread(query[0].transpose(0, 1)).transpose(1, 2)
    out, _ = attend(module, laid, key, value, attention_mask, **options)
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
    return backbone.config._attn_implementation in _NAMES.values()


def attends_flat(backbone: Backbone) -> bool:
    """Whether packed keys and values may stay as they are."""
    heads = (backbone.config.num_attention_heads, backbone.config.num_key_value_heads)
    return takes_varlen(backbone.device, backbone.dtype, *heads, backbone.head_dim)


@contextmanager
def fast_attention(backbone: Backbone) -> Iterator[None]:
    """Let the backbone attend by `packed_attention`, where that is faster, within the context.

    A model whose config drops attention out is left to PyTorch, which does so.
    """
    config = backbone.config
    has_dropout = getattr(config, "attention_dropout", 0.0) > 0
    name = _NAMES.get(backbone.device.type)
    if name is None or has_dropout or config._attn_implementation != "sdpa":
        yield
        return
    attends_flat(backbone)  # tried here: in a pass, what a trial keeps would be kept of the pass
    attend = grouped_attention if name == _NAMES["cpu"] else sdpa_attention_forward
    AttentionInterface.register(name, partial(packed_attention, attend))
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
