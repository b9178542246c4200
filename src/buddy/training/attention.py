"""Causal attention for training on a CPU: plain matrix products, no fused kernel.

PyTorch's fused CPU kernel takes four times as long, forward and backward, for sequences as short
as instruction data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from buddy.backbone.backbone import Backbone

_NAME: Final = "buddy_grouped"
_LONGEST: Final = 512
"""Tokens beyond which whole score matrices would fill the memory."""


def grouped_attention(
    module: Any,
    query: Float[Tensor, "batch heads tokens head"],
    key: Float[Tensor, "batch kv_heads slots head"],
    value: Float[Tensor, "batch kv_heads slots head"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions; the query heads of a group share one product."""
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


@contextmanager
def fast_attention(backbone: Backbone) -> Iterator[None]:
    """Within it the backbone attends by `grouped_attention`, where that is faster."""
    config = backbone.config
    if backbone.device.type != "cpu" or config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(_NAME, grouped_attention)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
