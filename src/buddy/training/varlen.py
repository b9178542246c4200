"""Causal attention of sequences that lie side by side, by torch's kernel that knows their ends.

The kernel is of CUDA, of half precision and of some widths of heads. Where it can be had is found
by trying: a device takes it once it has agreed with plain attention, in values and in gradients.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from buddy.errors import reason

_LOG: Final = logging.getLogger("buddy")
_TRIED: Final = (5, 130, 9)
"""Lengths of the sequences that are tried."""
_APART: Final = 0.03
"""Difference that rounding may make, as a share of the largest number."""
_OPTIONS: Final = frozenset({"scale", "window_size", "enable_gqa"})


def find_kernel() -> Callable[..., Tensor] | None:
    """The kernel, torch's `varlen_attn`; None in a version that has it with fewer options."""
    from torch.nn.attention.varlen import varlen_attn

    has_all = inspect.signature(varlen_attn).parameters.keys() >= _OPTIONS
    return cast(Callable[..., Tensor], varlen_attn) if has_all else None


def varlen_attention(
    query: Float[Tensor, "tokens heads head"],
    key: Float[Tensor, "tokens kv_heads head"],
    value: Float[Tensor, "tokens kv_heads head"],
    ends: Int[Tensor, " ends"],
    longest: int,
    scale: float | None,
) -> Float[Tensor, "tokens heads head"]:
    """Each token attends to those of its sequence up to itself.

    Args:
        query: Of sequences side by side.
        key: Of the same tokens.
        value: Of the same tokens.
        ends: 0, and the token after the last of each sequence; int32.
        longest: No sequence has more tokens.
        scale: Of the scores; by the width of heads if None.
    """
    kernel = find_kernel()
    assert kernel is not None  # `takes_varlen` was asked
    return kernel(
        *(query, key, value, ends, ends, longest, longest),
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )


@cache
def takes_varlen(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> bool:
    """Whether `varlen_attention` computes on a device what plain attention does; tried once.

    Args:
        device: Where.
        dtype: Of queries, keys and values.
        heads: Of queries.
        kv_heads: Of keys and values.
        width: Of a head.
    """
    if device.type != "cuda":
        return False
    try:
        apart = _apart(device, dtype, heads, kv_heads, width)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        why = reason(error)
    else:
        if apart <= _APART:
            return True
        why = f"its numbers differ by {apart:.3g} of the largest"
    _LOG.info("torch's varlen_attn is not used for training on %s in %s: %s", device, dtype, why)
    return False


def _apart(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> float:
    """The largest difference from plain attention, as a share of the largest number."""
    tokens = sum(_TRIED)
    inputs = []
    for turn, count in enumerate((heads, kv_heads, kv_heads), start=1):
        angles = torch.arange(tokens * count * width, dtype=torch.float32, device=device)
        drawn = torch.sin(angles * (0.7 + turn)).view(tokens, count, width)
        inputs.append(drawn.to(dtype).requires_grad_())
    ends = torch.tensor((0, *_TRIED), device=device).cumsum(0).to(torch.int32)
    with torch.enable_grad():
        made = varlen_attention(inputs[0], inputs[1], inputs[2], ends, max(_TRIED), None)
        plain = [tensor.detach().float().requires_grad_() for tensor in inputs]
        parts = zip(*(torch.split(tensor, list(_TRIED)) for tensor in plain), strict=True)
        expected = torch.cat([_attended(*part) for part in parts])
        found = [made, *torch.autograd.grad(made.float().square().sum(), inputs)]
        wanted = [expected, *torch.autograd.grad(expected.square().sum(), plain)]
    shares = [
        float((one.detach().float() - other.detach()).abs().max() / other.detach().abs().max())
        for one, other in zip(found, wanted, strict=True)
    ]
    return max(shares)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
