"""Weight-only quantisation: int8 by row, int4 by groups of 32; activations stay as they are.

Decoding reads every weight once a token, so fewer bits are more tokens. A quantised layer computes
in the format of its input, from weights that are widened on the way, so that the general path and
the native decoder use the same numbers. A widened weight is rounded once, if at all: in bfloat16 or
float16 where scales are numbers of it, as those made here are in a model of bfloat16, and otherwise
from float32. Where the output projection is the embedding, token ids are embedded by its quantised
rows, and no other table is kept. Weights that a file has in groups of 32 already keep its numbers.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import torch
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.memory import LargePages, Release, keep
from buddy.backbone.nf4 import NF4Linear
from buddy.errors import ModelError

Quantisation = Literal["int8", "int4"]
GROUP: Final = 32
"""Neighbouring weights of a row that share a scale in int4, and in int8 that a file has so."""
SUPER: Final = 8
"""Neighbouring groups whose scales and minimums a file has in bytes, of units that they share."""
_NARROW: Final = (torch.bfloat16, torch.float16)
"""Formats in which a product of a weight and a scale that is a number of them is rounded once."""
_AT_ONCE: Final = 2**23
"""Weights widened at a time. Larger temporaries go back to the system, which clears them anew."""
_ROUNDED_AT_ONCE: Final = 2**17
"""Weights rounded at a time, in several copies of float32."""


class QuantisedLinear(nn.Module):
    """A linear layer with its weights in 8 or 4 bits.

    Args:
        weight: As the attribute.
        scales: As the attribute.
        minimums: As the attribute.
        bias: Added to what the weights make; None without.
        units: As the attribute.

    Attributes:
        weight: int8 [rows, columns]; or uint8 [rows, columns / 2], in which byte `i` of a group
            holds columns `i` (low bits) and `16 + i` (high bits), 8 standing for zero.
        scales: [rows] for int8 that is made here, [rows, columns / 32] for int4 and a file's int8;
            float32, or as minimums.
        minimums: Of int4, [rows, columns / 32]: what number 0 of a group stands for, in place of 8
            for zero. A weight is its number scaled, plus this. In float16, or in uint8 of units.
            None without.
        units: float32 [rows, columns / 256, 2], what 1 is worth of scales and of minimums in uint8.
            None without.
    """

    weight: Tensor
    scales: Tensor
    minimums: Tensor | None
    units: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        minimums: Tensor | None,
        bias: nn.Parameter | None,
        units: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.quantisation: Quantisation = "int8" if weight.dtype is torch.int8 else "int4"
        self.out_features, columns = weight.shape
        self.in_features = columns if self.quantisation == "int8" else 2 * columns
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("minimums", minimums)
        self.register_buffer("units", units)
        self.bias = bias
        self._narrow = {
            dtype
            for dtype in _NARROW
            if minimums is None and torch.equal(scales.to(dtype).float(), scales.float())
        }

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        quantisation: Quantisation,
        release: Release = keep,
        pages: LargePages | None = None,
    ) -> "QuantisedLinear":
        """Quantise a layer.

        Args:
            linear: With plain weights.
            quantisation: How.
            release: Told of each weight that is needed no longer, in parts.
            pages: Memory for its weights, of a model on the CPU.
        """
        pages = pages or LargePages()
        weight, scales = _quantised(linear.weight.detach(), quantisation, release, pages)
        return cls(weight, scales, None, linear.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """All but the bias move with the weights, but keep their number format."""
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in kept.items():
            setattr(self, name, tensor.to(self.weight.device))
        return self

    def widened(
        self, dtype: torch.dtype, rows: slice | Int[Tensor, " rows"] = slice(None)
    ) -> Float[Tensor, "rows columns"]:
        """The weights that the layer computes with, or some rows of them.

        Raises:
            IndexError: There is no such row.
        """

        def part(tensor: Tensor) -> Tensor:
            return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)

        weight, scales = part(self.weight), part(self.scales)
        minimums = None if self.minimums is None else part(self.minimums)
        if minimums is not None and self.units is not None:
            units = part(self.units).repeat_interleave(SUPER, 1)
            scales, minimums = scales * units[..., 0], minimums * units[..., 1]
        multiplied = dtype if dtype in self._narrow else torch.promote_types(dtype, torch.float32)
        if self.quantisation == "int4":
            pairs = weight.view(*scales.shape, GROUP // 2)
            values = torch.cat([pairs & 15, pairs >> 4], dim=2).to(multiplied)
            values = values.sub_(8) if minimums is None else values
        else:
            values = weight.to(multiplied)
            values = values if scales.ndim == 1 else values.view(*scales.shape, GROUP)
        values.mul_(scales.to(multiplied)[..., None])
        if minimums is not None:
            values.add_(minimums[..., None])
        return values.flatten(1).to(dtype)

    def forward(self, x: Float[Tensor, "*shape columns"]) -> Float[Tensor, "*shape rows"]:
        """Multiply by weights that are widened for this call, as `nn.Linear` does."""
        step = max(1, _AT_ONCE // self.in_features)
        parts = []
        for first in range(0, self.out_features, step):
            rows = slice(first, first + step)
            bias = None if self.bias is None else self.bias[rows]
            parts.append(nn.functional.linear(x, self.widened(x.dtype, rows), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class QuantisedEmbedding(nn.Module):
    """The embedding of token ids by the rows of a quantised output projection, which it shares.

    Args:
        embedding: Whose place it takes; its table is the projection's weight.
        head: That projection, quantised.

    Attributes:
        weight: [0, hidden]: no row of its own, in the number format of what it gives.
    """

    weight: Tensor

    def __init__(self, embedding: nn.Embedding, head: QuantisedLinear) -> None:
        super().__init__()
        self.head = head
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.register_buffer("weight", torch.empty_like(embedding.weight[:0]))
        self.embed_scale: Tensor | None = getattr(embedding, "embed_scale", None)

    def forward(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape hidden"]:
        """Widen a row for each id, and scale it where the family's own embedding does.

        Raises:
            IndexError: An id is no row.
        """
        rows = self.head.widened(self.weight.dtype, token_ids.flatten())
        rows = rows.view(*token_ids.shape, -1)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows)


def _quantised(
    weight: Tensor, quantisation: Quantisation, release: Release, pages: LargePages
) -> tuple[Tensor, Tensor]:
    """Weights and scales, in memory that is taken before what is needed on the way."""
    (rows, columns), is_int8 = weight.shape, quantisation == "int8"
    quantise = quantise_int8 if is_int8 else quantise_int4
    found, scales = (
        pages.empty(shape, dtype)
        if weight.device.type == "cpu"
        else weight.new_empty(shape, dtype=dtype)
        for shape, dtype in (
            ((rows, columns), torch.int8) if is_int8 else ((rows, columns // 2), torch.uint8),
            ((rows,) if is_int8 else (rows, columns // GROUP), torch.float32),
        )
    )
    step = max(1, _ROUNDED_AT_ONCE // columns)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        found[part], scales[part] = quantise(weight[part])
        release(weight[part])
    release(weight)  # the pages that parts share
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


def quantisation_of(model: nn.Module) -> Quantisation | None:
    """How a model's layers are quantised: int4 if any is; None where none is, or by NF4."""
    layers = (layer for layer in model.modules() if isinstance(layer, QuantisedLinear))
    return min((layer.quantisation for layer in layers), default=None)


StoredLayer = Callable[[nn.Linear, Quantisation], QuantisedLinear | None]
"""What a layer is in the file that its weights came from; None where that has it otherwise."""


def quantise_backbone(
    backbone: Backbone,
    quantisation: Quantisation,
    release: Release = keep,
    stored: StoredLayer = lambda *_: None,
    pages: LargePages | None = None,
) -> None:
    """Quantise all linear layers in place, and the embedding that the output projection is.

    The output projection takes int8 in either case, and so do rows that int4 cannot divide.

    Args:
        backbone: The model.
        quantisation: How.
        release: Told of each weight that is needed no longer, in parts.
        stored: Layers that keep the numbers of a file.
        pages: Memory for weights, of a model on the CPU: decoding reads large pages faster.

    Raises:
        ModelError: No such quantisation, or an adapter is not merged.
    """
    check_quantisation(quantisation)
    parts = (*backbone.blocks.modules(), backbone.embedding, backbone.head)
    if any(hasattr(part, "lora_A") for part in parts):
        raise ModelError("merge the adapter before quantising: merge_adapter=True")
    pages = pages or LargePages()
    for parent in list(backbone.blocks.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                made = _kept(stored(child, quantisation), pages)
                setattr(parent, name, made or quantised_layer(child, quantisation, release, pages))
    head, embedding = backbone.head, backbone.embedding
    if type(head) is nn.Linear:
        is_tied, made = embedding.weight is head.weight, _kept(stored(head, "int8"), pages)
        made = made or QuantisedLinear.of(head, "int8", release, pages)
        backbone.set_ends(QuantisedEmbedding(embedding, made) if is_tied else embedding, made)


def _kept(layer: QuantisedLinear | None, pages: LargePages) -> QuantisedLinear | None:
    if layer is not None:
        for name, tensor in layer.named_buffers():
            setattr(layer, name, pages.copy(tensor))
    return layer


def quantised_layer(
    linear: nn.Linear, quantisation: Quantisation, release: Release, pages: LargePages
) -> QuantisedLinear:
    """A block's linear layer, quantised: in int8 where int4 cannot divide its rows."""
    fits = linear.in_features % GROUP == 0
    return QuantisedLinear.of(linear, quantisation if fits else "int8", release, pages)
