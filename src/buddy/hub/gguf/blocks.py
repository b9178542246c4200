"""Weights of a GGUF file in the bits that it has them in, with its own numbers and scales.

A block of Q8_0 or Q4_0 is 32 neighbouring weights of a row in whole numbers, behind a scale of
float16 that multiplies them. Buddy's groups are the same, so nothing is rounded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from buddy.backbone.quantised import GROUP, Quantisation, QuantisedLinear, StoredLayer
from buddy.hub.gguf.header import GgufHeader, GgufTensor, read_header

_SCALE_BYTES: Final = 2
_HELD: Final[Mapping[str, tuple[Quantisation, ...]]] = {
    "Q8_0": ("int8",),
    "Q4_0": ("int4", "int8"),
}
"""What holds the numbers of a GGUF type as they are."""


def kept_types(header: GgufHeader) -> dict[str, list[str]]:
    """The types in a file whose numbers a quantisation keeps as they are, by quantisation."""
    types = {tensor.kind for tensor in header.tensors.values()}
    return {
        quantisation: kept
        for quantisation in ("int4", "int8")
        if (kept := sorted(t for t in types if quantisation in _HELD.get(t, ())))
    }


def stored_layers(path: Path, model: nn.Module) -> StoredLayer:
    """What makes layers of a model from the blocks of the file that it was converted from.

    Args:
        path: The GGUF file.
        model: A Hugging Face causal LM, its linear layers as they were loaded.

    Raises:
        CheckpointError: The file is damaged.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    header, config = read_header(path), cast(Any, model.config)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(arch, header.num_blocks)
    layers = {layer: name for name, layer in model.named_modules() if type(layer) is nn.Linear}

    def stored(linear: nn.Linear, quantisation: Quantisation) -> QuantisedLinear | None:
        name = names.get_name(layers[linear])
        tensor = header.tensors.get(f"{name}.weight")
        if tensor is None and name == "output":  # the embedding is the output projection
            tensor = header.tensors.get("token_embd.weight")
        if tensor is None or quantisation not in _HELD.get(tensor.kind, ()):
            return None
        weight, scales = _read(path, tensor, quantisation)
        if header.architecture == "llama" and layers[linear].endswith(("q_proj", "k_proj")):
            weight, scales = (_in_halves(part, config.head_dim) for part in (weight, scales))
        return QuantisedLinear(weight, scales, linear.bias)

    return stored


def _read(path: Path, tensor: GgufTensor, quantisation: Quantisation) -> tuple[Tensor, Tensor]:
    """Weights and scales as `QuantisedLinear` has them."""
    rows, columns = tensor.shape
    shape = (rows, columns // GROUP, tensor.num_bytes * GROUP // (rows * columns))
    blocks = np.memmap(path, np.uint8, "r", tensor.offset, shape)
    scales = blocks[..., :_SCALE_BYTES].copy().view("<f2")[..., 0].astype(np.float32)
    numbers = torch.from_numpy(blocks[..., _SCALE_BYTES:].copy())
    if tensor.kind == "Q8_0":
        numbers = numbers.view(torch.int8)
    elif quantisation == "int8":
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=2).to(torch.int8).sub_(8)
    return numbers.view(rows, -1), torch.from_numpy(scales)


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of query or key heads: llama.cpp rotates neighbours, and transformers halves."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
