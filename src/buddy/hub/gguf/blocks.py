"""Weights of a GGUF file in the bits that it has them in, with its own numbers and scales.

A block of Q8_0, Q4_0 or Q4_1 is 32 neighbouring weights of a row in whole numbers, behind a scale
of float16 that multiplies them, in Q4_1 also a minimum that is added. A block of Q4_K is eight such
groups, whose scales and minimums are numbers of 6 bits times one of float16 for all. Buddy's groups
are the same, so nothing is rounded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from buddy.backbone.quantised import GROUP, Quantisation, QuantisedLinear, StoredLayer
from buddy.hub.gguf.header import GgufHeader, GgufTensor, read_header

_FLOAT_BYTES: Final = 2
_HELD: Final[Mapping[str, tuple[Quantisation, ...]]] = {
    "Q8_0": ("int8",),
    "Q4_0": ("int4", "int8"),
    "Q4_1": ("int4",),
    "Q4_K": ("int4",),
}
"""What holds the numbers of a GGUF type as they are."""
_Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


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
        weight, scales, minimums, units = _read(path, tensor, quantisation)
        made = QuantisedLinear(weight, scales, minimums, linear.bias, units)
        if header.architecture == "llama" and layers[linear].endswith(("q_proj", "k_proj")):
            for part, numbers in made.named_buffers():
                setattr(made, part, _in_halves(numbers, config.head_dim))
        return made

    return stored


def _read(path: Path, tensor: GgufTensor, quantisation: Quantisation) -> _Parts:
    """Weights, scales, minimums and units as `QuantisedLinear` has them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    rows, columns = tensor.shape
    num_weights, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    shape = (rows, columns // num_weights, num_bytes)
    blocks = np.memmap(path, np.uint8, "r", tensor.offset, shape)
    if tensor.kind == "Q4_K":
        return _of_super_blocks(blocks)
    scales = _floats(blocks, 0)
    if tensor.kind == "Q4_1":
        numbers = torch.from_numpy(blocks[..., 2 * _FLOAT_BYTES :].copy())
        return numbers.view(rows, -1), scales, _floats(blocks, 1), None
    numbers = torch.from_numpy(blocks[..., _FLOAT_BYTES:].copy())
    if tensor.kind == "Q8_0":
        numbers = numbers.view(torch.int8)
    elif quantisation == "int8":
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=2).to(torch.int8).sub_(8)
    return numbers.view(rows, -1), scales.float(), None, None


def _of_super_blocks(blocks: NDArray[np.uint8]) -> _Parts:
    """The same of Q4_K; 32 bytes hold a group in low bits, the next in high."""
    from gguf.quants import Q4_K

    rows, numbers = len(blocks), torch.from_numpy(blocks[..., 16:].copy())
    numbers = numbers.view(rows, -1, 4, 32)
    groups = torch.stack([numbers & 15, numbers >> 4], dim=3)
    weight = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    packed = np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12)
    scales, minimums = (torch.from_numpy(p).view(rows, -1) for p in Q4_K.get_scale_min(packed))
    units = torch.stack([_floats(blocks, 0), -_floats(blocks, 1)], dim=2).float()
    return weight.reshape(rows, -1), scales, minimums, units


def _floats(blocks: NDArray[np.uint8], at: int) -> Tensor:
    """What the blocks' float16 number `at` is, [rows, blocks]."""
    halves = blocks[..., at * _FLOAT_BYTES : (at + 1) * _FLOAT_BYTES].copy().view("<f2")
    return torch.from_numpy(halves[..., 0].astype(np.float16))


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of query or key heads: llama.cpp rotates neighbours, and transformers halves."""
    heads = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
