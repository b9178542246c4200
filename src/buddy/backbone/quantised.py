"""Weight-only quantisation: int8 by row, int4 by groups of 32; activations stay as they are.

Decoding reads every weight once a token, so fewer bits are more tokens. A quantised layer computes
in the format of its input, from weights that are widened on the way, so that the general path and
the native decoder use the same numbers. Scales of int8 are numbers of bfloat16, as those of int4
are in a model of bfloat16, so that a widened weight is rounded once.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.nf4 import NF4Linear
from buddy.errors import ModelError

Quantisation = Literal["int8", "int4"]
GROUP: Final = 32
"""Neighbouring weights of a row that share a scale in int4."""
_AT_ONCE: Final = 2**23
"""Weights widened at a time. Larger temporaries go back to the system, which clears them anew."""
_ROUNDED_AT_ONCE: Final = 2**17
"""Weights rounded at a time, in several copies of float32."""


class QuantisedLinear(nn.Module):
    """A linear layer with its weights in 8 or 4 bits.

    Attributes:
        weight: int8 [rows, columns]; or uint8 [rows, columns / 2], in which byte `i` of a group
            holds columns `i` (low bits) and `16 + i` (high bits), 8 standing for zero.
        scales: [rows] for int8, [rows, columns / 32] for int4.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, quantisation: Quantisation) -> None:
        super().__init__()
        weight, scales = _quantised(linear.weight.detach(), quantisation)
        self.quantisation = quantisation
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales move with the weights, but keep their number format."""
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scales = scales.to(self.weight.device)
        return self

    def widened(
        self, dtype: torch.dtype, rows: slice = slice(None)
    ) -> Float[Tensor, "rows columns"]:
        """The weights that the layer computes with, or some rows of them."""
        weight, scales = self.weight[rows], self.scales[rows].to(dtype)
        if self.quantisation == "int8":
            return weight.to(dtype).mul_(scales[:, None])
        pairs = weight.view(len(weight), -1, GROUP // 2)
        values = torch.cat([pairs & 15, pairs >> 4], dim=2).to(dtype).sub_(8)  # [R, groups, 32]
        return values.mul_(scales[..., None]).flatten(1)

    def forward(self, x: Float[Tensor, "*shape columns"]) -> Float[Tensor, "*shape rows"]:
        """Multiply by weights that are widened for this call, as `nn.Linear` does."""
        step = max(1, _AT_ONCE // self.in_features)
        parts = []
        for first in range(0, self.out_features, step):
            rows = slice(first, first + step)
            bias = None if self.bias is None else self.bias[rows]
            parts.append(nn.functional.linear(x, self.widened(x.dtype, rows), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _quantised(weight: Tensor, quantisation: Quantisation) -> tuple[Tensor, Tensor]:
    """Weights and scales, in memory that is taken before what is needed on the way."""
    (rows, columns), is_int8 = weight.shape, quantisation == "int8"
    quantise = quantise_int8 if is_int8 else quantise_int4
    found = weight.new_empty(
        (rows, columns if is_int8 else columns // 2), dtype=torch.int8 if is_int8 else torch.uint8
    )
    scales = weight.new_empty((rows,) if is_int8 else (rows, columns // GROUP), dtype=torch.float32)
    step = max(1, _ROUNDED_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        found[part], scales[part] = quantise(weight[part])
    return found, scales


def quantise_int8(
    weight: Float[Tensor, "rows columns"],
) -> tuple[Int8[Tensor, "rows columns"], Float[Tensor, " rows"]]:
    """Round to the nearest of 255 values between plus and minus each row's largest."""
    wide = weight.float()
    scales = (wide.abs().amax(1).clamp(min=1e-12) / 127).bfloat16().float()
    return (wide / scales[:, None]).round().to(torch.int8), scales


def quantise_int4(
    weight: Float[Tensor, "rows columns"],
) -> tuple[UInt8[Tensor, "rows half"], Float[Tensor, "rows groups"]]:
    """Round to the nearest of 16 values; a group's weight of largest size is met exactly.

    Raises:
        ModelError: Rows do not divide into groups.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ModelError(f"int4 needs rows of a multiple of {GROUP} weights, got {columns}")
    groups = weight.float().view(rows, -1, GROUP)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    scales = largest / -8
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    values = ((groups * inverse[..., None]).round() + 8).clamp(0, 15).to(torch.uint8)
    low, high = values.chunk(2, dim=2)
    return (low | (high << 4)).flatten(1), scales


def check_quantisation(quantisation: str) -> None:
    """Refuse what is no quantisation.

    Raises:
        ModelError: Neither "int8" nor "int4".
    """
    if quantisation not in get_args(Quantisation):
        raise ModelError(
            f"quant must be one of {', '.join(get_args(Quantisation))}, got {quantisation!r}"
        )


def is_quantised(model: nn.Module) -> bool:
    """Whether any of its layers holds its weights in fewer bits."""
    return any(isinstance(layer, QuantisedLinear | NF4Linear) for layer in model.modules())


def quantise_backbone(
    backbone: Backbone,
    quantisation: Quantisation,
    release: Callable[[Tensor], None] = lambda weight: None,
) -> None:
    """Quantise all linear layers in place.

    The output projection takes int8 in either case, and so do rows that int4 cannot divide.

    Args:
        backbone: The model.
        quantisation: How.
        release: Told of each weight that is needed no longer.

    Raises:
        ModelError: No such quantisation, or an adapter is not merged.
    """
    check_quantisation(quantisation)
    for block in backbone.blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if hasattr(child, "lora_A"):
                    raise ModelError("merge the adapter before quantising: merge_adapter=True")
                if type(child) is nn.Linear:
                    fits = child.in_features % GROUP == 0
                    setattr(parent, name, QuantisedLinear(child, quantisation if fits else "int8"))
                    release(child.weight)
    if type(backbone.head) is nn.Linear:
        backbone.set_head(QuantisedLinear(backbone.head, "int8"))
