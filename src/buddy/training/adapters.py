"""LoRA layers as one function of autograd, in the dtype of the model.

PEFT computes an adapter in the adapter's own float32: it converts each layer's input, scales the
update apart, and keeps the converted input for the backward pass. In training on a CPU that takes
longer than the layer itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.nf4 import NF4Linear


class _Adapted(torch.autograd.Function):
    """`x W' + bias + (s * x A') (scaling B)'`; W and bias are frozen, W perhaps in 4 bits.

    `s` scales each rank of each token, or is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: nn.Linear,
        a: Tensor,
        b: Tensor,
        scale: float,
        by_depth: Tensor | None,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        down, up = a.to(x.dtype), (b * scale).to(x.dtype)
        low, plain, ranks = flat @ down.T, None, None
        if by_depth is not None:
            plain, ranks = low, by_depth.reshape(-1, by_depth.shape[-1]).to(x.dtype)
            low = plain * ranks
        out = nn.functional.linear(flat, _weight(base, x.dtype), base.bias).addmm_(low, up.T)
        ctx.save_for_backward(flat, down, up, low, plain, ranks)
        ctx.base, ctx.scale, ctx.shape = base, scale, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, slope: Tensor
    ) -> tuple[Tensor | None, None, Tensor, Tensor, None, Tensor | None]:
        flat, down, up, low, plain, ranks = ctx.saved_tensors
        slope = slope.reshape(-1, slope.shape[-1])
        through = slope @ up
        by_ranks = None
        if ranks is not None:
            by_ranks = (through * plain).float().view(*ctx.shape[:-1], -1)
            through = through * ranks
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = slope @ _weight(ctx.base, slope.dtype)
            by_x = by_x.addmm_(through, down).view(ctx.shape)
        by_a = (through.T @ flat).float()
        by_b = (low.T @ slope).T.float() * ctx.scale
        return by_x, None, by_a, by_b, None, by_ranks


def _weight(base: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight as it is multiplied; of one in 4 bits nothing is kept but those."""
    return base.widened(dtype) if isinstance(base, NF4Linear) else base.weight


def adapted_linear(
    layer: Any, x: Float[Tensor, "*shape inputs"]
) -> Float[Tensor, "*shape outputs"]:
    """What a LoRA layer of PEFT computes, its one adapter in the dtype of `x`.

    Args:
        layer: That `is_plain`.
        x: In the dtype of the layer's weight.
    """
    (name,) = layer.active_adapters
    scales = getattr(layer, "scales_by_depth", None)
    return cast(
        Tensor,
        _Adapted.apply(  # type: ignore[no-untyped-call]
            x,
            layer.base_layer,
            layer.lora_A[name].weight,
            layer.lora_B[name].weight,
            layer.scaling[name],
            None if scales is None else 1 + scales(),
        ),
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether it is a LoRA layer with one adapter, not merged, without dropout or a variant."""
    own: Any = layer
    if not hasattr(layer, "lora_A") or type(own.base_layer) not in (nn.Linear, NF4Linear):
        return False
    if own.merged or own.disable_adapters or len(own.active_adapters) != 1:
        return False
    (name,) = own.active_adapters
    return (
        name in own.lora_A
        and name not in own.lora_variant
        and isinstance(own.lora_dropout[name], nn.Identity)
        and own.lora_B[name].bias is None
        and not own.base_layer.weight.requires_grad
    )


@contextmanager
def fast_adapters(backbone: Backbone) -> Iterator[None]:
    """Let the plain LoRA layers of the blocks compute by `adapted_linear`, within the context."""
    layers = [layer for block in backbone.blocks for layer in block.modules() if is_plain(layer)]
    for layer in layers:
        layer.forward = partial(adapted_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
