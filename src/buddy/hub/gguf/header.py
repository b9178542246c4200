"""What a GGUF file says about itself, read with every length checked against the file's end.

The libraries that read GGUF trust those lengths: a damaged one makes them loop for hours or run out
of memory. Passing this reader is what makes a file safe to hand to them.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from buddy.errors import CheckpointError

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Architectures that are converted; Mistral files call themselves llama."""

_SIZES: Final = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
        *("attention.head_count", "attention.head_count_kv"),
        *("attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    }
)
"""What a file may say of its model, beside `rope.scaling`."""
_REQUIRED: Final = ("context_length", "attention.layer_norm_rms_epsilon")
"""Those of them that show nowhere in the weights, and have no value where a file states none."""
_UNUSED: Final = frozenset({"tensor_data_layout", "expert_used_count"})
"""What llama.cpp makes nothing of, in dense models of these architectures."""
_NOTHING: Final = (0, "", "none")
_CAUSAL: Final = "attention.causal"
_BLOCK: Final = re.compile(r"blk\.\d+\.")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_SCALARS: Final = {
    kind: struct.Struct("<" + code)
    for kind, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_DIMENSIONS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """Where a tensor's numbers lie, and how they are written."""

    kind: str
    """Number format, as in `Q4_0` or `F32`."""
    shape: tuple[int, ...]
    """Sizes as torch orders them: the neighbouring numbers last."""
    offset: int
    """First byte, from the beginning of the file."""
    num_bytes: int
    """Bytes of its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """The metadata of a GGUF file whose tensors are known to lie inside it."""

    path: Path
    """The file."""
    metadata: Mapping[str, Any]
    """Strings and numbers by key; an array is represented by its length."""
    tensors: Mapping[str, GgufTensor]
    """Tensors in the file by name."""
    num_blocks: int
    """Transformer blocks that it has tensors of."""
    num_weights: int
    """Numbers in all tensors that are parameters of the model."""
    rope_factors: tuple[float, ...] | None
    """What each rotary frequency is divided by, in files that say so."""

    @property
    def architecture(self) -> str:
        """One of `ARCHITECTURES`."""
        return str(self.metadata["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's prefix, such as `rope.freq_base`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def of_tokenizer(self, key: str, default: Any = None) -> Any:
        """Metadata under the tokenizer's prefix, such as `eos_token_id`."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file; its weights are not read.

    Raises:
        CheckpointError: The file is not GGUF, is damaged or cut short, is one part of several, or
            has an architecture that Buddy does not convert.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise CheckpointError(
                    f"{path} is not a GGUF file: expected it to begin with {_MAGIC!r}, "
                    f"got {magic!r}"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _parse(path, _Cursor(data, at=len(magic)))
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    # A corrupt number can be negative, overflow an index or name a missing type.
    except (ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short: {error}; copy or download it again"
        ) from error
    _require_convertible(header)
    return header


class _Cursor:
    """A place in the file that never passes its end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def skip(self, num_bytes: int) -> int:
        """Move on; return where the skipped bytes begin."""
        if num_bytes > len(self.data) - self.at:
            raise ValueError(
                f"expected at least {self.at + num_bytes} bytes, got {len(self.data)} bytes"
            )
        begin = self.at
        self.at += num_bytes
        return begin

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.data, self.skip(form.size))[0]

    def string(self) -> str:
        begin = self.skip(self.number(_U64))
        return self.data[begin : self.at].decode("utf-8")

    def value(self) -> Any:
        """A typed metadata value; arrays are skipped and give their length."""
        kind = self.number(_U32)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._skip_array()
        return self.number(_scalar(kind))

    def _skip_array(self) -> int:
        kind, length = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            for _ in range(length):
                self.skip(self.number(_U64))
        else:
            self.skip(length * _scalar(kind).size)
        return int(length)


def _scalar(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise ValueError(f"unknown metadata type {kind}")
    return _SCALARS[kind]


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.number(_U32)
    if version not in _VERSIONS:
        raise ValueError(f"expected GGUF version 2 or 3, little-endian, got {version}")
    num_tensors, num_values = cursor.number(_U64), cursor.number(_U64)
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value()
    tensors = dict(_tensor(cursor) for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 0:
        raise ValueError(f"general.alignment is {str(alignment)[:80]}")
    data_begin = math.ceil(cursor.at / alignment) * alignment if alignment else cursor.at
    for name, tensor in tensors.items():
        cursor.at = data_begin
        cursor.skip(tensor.offset + tensor.num_bytes)
        tensors[name] = replace(tensor, offset=data_begin + tensor.offset)
    return GgufHeader(
        path=path,
        metadata=metadata,
        tensors=tensors,
        num_blocks=len({name.split(".")[1] for name in tensors if _BLOCK.match(name)}),
        num_weights=sum(math.prod(t.shape) for n, t in tensors.items() if n != _ROPE_FACTORS),
        rope_factors=_rope_factors(cursor.data, tensors.get(_ROPE_FACTORS)),
    )


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """One row of the tensor table; offsets count from where the data begins."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    num_dimensions = cursor.number(_U32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has {num_dimensions} dimensions, expected 1 to 4")
    shape = tuple(cursor.number(_U64) for _ in range(num_dimensions))[::-1]
    kind = GGMLQuantizationType(cursor.number(_U32))
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    num_bytes = math.prod(shape) // block_elements * block_bytes
    offset = cursor.number(_U64)
    return name, GgufTensor(kind=kind.name, shape=shape, offset=offset, num_bytes=num_bytes)


def _rope_factors(data: mmap.mmap, tensor: GgufTensor | None) -> tuple[float, ...] | None:
    if tensor is None:
        return None
    num_elements = math.prod(tensor.shape)
    if tensor.num_bytes != num_elements * 4:
        raise ValueError(f"{_ROPE_FACTORS!r} is not stored as 32-bit floats")
    end = tensor.offset + tensor.num_bytes
    return struct.unpack(f"<{num_elements}f", data[tensor.offset : end])


def _require_convertible(header: GgufHeader) -> None:
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the architecture {architecture!r}, which Buddy cannot convert; "
            f"expected one of {', '.join(ARCHITECTURES)} (Mistral files say llama)"
        )
    num_parts = header.metadata.get("split.count", 1)
    if num_parts not in (0, 1):
        raise CheckpointError(
            f"{header.path} is one of {num_parts} parts; "
            "join them with `llama-gguf-split --merge` and use the result"
        )
    num_experts = header.of_model("expert_count", 0)
    if num_experts != 0:
        raise CheckpointError(
            f"{header.path} is a mixture of {num_experts} experts; expected a dense model"
        )
    stated = header.of_model("block_count")
    if stated != header.num_blocks:
        raise CheckpointError(
            f"{header.path} is damaged: it says that it has {str(stated)[:80]} blocks, and has "
            f"tensors of {header.num_blocks}; copy or download it again"
        )
    _require_known(header)
    for key, value in header.metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(
                f"{header.path} is damaged: {key[:80]} is {value}, expected a finite number; copy "
                "or download it again"
            )
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise CheckpointError(
            f"{header.path} holds no tokenizer; convert the model again with its vocabulary"
        )


def _require_known(header: GgufHeader) -> None:
    """Refuse what a file says of its model and no reader here would obey."""
    prefix = f"{header.architecture}."
    lacking = [key for key in _REQUIRED if header.of_model(key) is None]
    if lacking:
        raise CheckpointError(
            f"{header.path} is damaged: it says nothing of {prefix}{lacking[0]}; copy or download "
            "it again"
        )
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _SIZES | _UNUSED or name.startswith("rope.scaling."):
            continue
        if value is not True if name == _CAUSAL else value not in _NOTHING:
            raise CheckpointError(
                f"{header.path} sets {key[:80]} to {str(value)[:80]}, which Buddy does not "
                "compute; use the model's safetensors folder instead"
            )
