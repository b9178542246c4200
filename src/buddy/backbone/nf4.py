"""A frozen base of 4 bits a weight, which adapters are put on: NF4, by bitsandbytes.

A weight is one of 16 quantiles of a normal distribution; 64 neighbours share a scale, and 256
scales, in 8 bits, one of their own. Of bitsandbytes the functions are used and not its layer, which
on CPUs that multiply bfloat16 changes its weights when it is evaluated, so that a training that
goes on has no gradients.

Source: Dettmers et al., QLoRA, 2023.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError, is_out_of_memory, reason

FrozenFormat = Literal["nf4"]
GROUP: Final = 64
"""Neighbouring weights, row after row, that share a scale."""
_SCALES: Final = 256
"""Scales that share a scale."""


class NF4Linear(nn.Linear):
    """A linear layer whose weights are frozen in 4 bits, and widened for each product.

    Args:
        linear: Whose weights they are.
        device: Where they are quantised, and stay.

    Attributes:
        weight: uint8 [rows * columns / 2, 1].
        state: Scales, as bitsandbytes keeps them.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(device)
        # A row a group: of rows that end within one, bitsandbytes 0.50 takes wrong scales on CPUs.
        packed, self.state = _functions().quantize_4bit(
            weight.reshape(-1, GROUP), blocksize=GROUP, compress_statistics=True, quant_type="nf4"
        )
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales move with the weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.state.to(self.weight.device)
        return self

    def widened(self, dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
        """The weights that the layer computes with."""
        wide: Tensor = _functions().dequantize_4bit(self.weight, self.state)
        return wide.view(self.out_features, self.in_features).to(dtype)

    def forward(self, x: Float[Tensor, "*shape columns"]) -> Float[Tensor, "*shape rows"]:
        """Multiply by widened weights, of which nothing is kept for the backward pass."""
        out: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """`x W' + bias`; W is widened once more for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: NF4Linear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, layer.widened(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope @ ctx.layer.widened(slope.dtype), None


def _functions() -> Any:
    from bitsandbytes import functional

    return functional


def check_nf4(backbone: Backbone) -> None:
    """Refuse a base that cannot be frozen in NF4; its weights may be on the meta device.

    Raises:
        ModelError: bitsandbytes is not there, or the model is a mixture of experts.
    """
    try:
        _functions()
    except ImportError as error:
        raise ModelError(
            f'quant "nf4" needs bitsandbytes, which is not here ({reason(error)}): '
            'pip install "buddy-llm[train,qlora]", or leave quant out'
        ) from error
    if backbone.family.mixture:
        raise ModelError(
            'quant "nf4" is of linear layers, and the experts of a mixture are none: leave quant '
            "out, or name a model without experts"
        )


def layers_to_freeze(backbone: Backbone) -> dict[str, nn.Linear]:
    """Linear layers of the blocks by name: all whose weights divide into groups."""
    return {
        name: layer
        for name, layer in backbone.blocks.named_modules()
        if type(layer) is nn.Linear and layer.weight.numel() % GROUP == 0
    }


def freeze_in_nf4(
    backbone: Backbone,
    device: torch.device,
    release: Callable[[Tensor], None] = lambda weight: None,
) -> None:
    """Quantise the linear layers of the blocks in place, one after another.

    The embedding and the output projection stay as they are, and so do norms and biases.

    Args:
        backbone: The model.
        device: Where the layers are quantised, and stay.
        release: Told of each weight that is needed no longer.

    Raises:
        ModelError: As `check_nf4`; or an adapter is not merged, or bitsandbytes cannot compute on
            this device.
    """
    check_nf4(backbone)
    blocks = backbone.blocks
    if any(hasattr(layer, "lora_A") for layer in blocks.modules()):
        raise ModelError("merge the adapter before quantising: merge_adapter=True")
    for name in list(layers_to_freeze(backbone)):  # by name, so that none is held for longer
        layer = cast(nn.Linear, blocks.get_submodule(name))
        parent, _, own = name.rpartition(".")
        try:
            setattr(blocks.get_submodule(parent), own, NF4Linear(layer, device))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise ModelError(
                f'quant "nf4": bitsandbytes cannot quantise on {device} ({reason(error)}): leave '
                "quant out, or name another device"
            ) from error
        release(layer.weight)


def nf4_bytes(num_weights: int) -> int:
    """Bytes of a layer's weights in NF4, and of their scales; tables of a kilobyte not counted."""
    scales = num_weights // GROUP
    return num_weights // 2 + scales + 4 * -(-scales // _SCALES)
