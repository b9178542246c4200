"""The structures that the kernel reads, field by field as in model.h."""

import ctypes
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

FLOAT32, BFLOAT16, INT8, INT4, INT8_GROUPS, INT4_HALVES, INT4_BYTES = range(7)
ZEROS, HIDDEN, RESIDUAL, PROJECTED = range(4)
QUANTISED: Final = {
    ("int8", 1, None): INT8,
    ("int8", 2, None): INT8_GROUPS,
    ("int4", 2, None): INT4,
    ("int4", 2, torch.float16): INT4_HALVES,
    ("int4", 2, torch.uint8): INT4_BYTES,
}
"""Formats by bits, dimensions of the scales, and number format of scales and minimums."""
FORMATS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

_Fields = list[tuple[str, Any]]
_POINTER: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int32


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Matrix(ctypes.Structure):
    """Weights [rows, columns] in one of the seven formats."""

    _fields_: ClassVar[_Fields] = [
        *_fields(_POINTER, "weights scales minimums units bias"),
        *_fields(_INT, "rows columns format by_dots"),
        *_fields(_POINTER, "down up deviations"),
    ]


class Block(ctypes.Structure):
    """Weights of one block."""

    _fields_: ClassVar[_Fields] = [
        *_fields(Matrix, "query key value output gate up down"),
        *_fields(_POINTER, "attention_norm mlp_norm query_norm key_norm"),
        ("window", _INT),
    ]


class Model(ctypes.Structure):
    """Weights and sizes."""

    _fields_: ClassVar[_Fields] = [
        ("blocks", ctypes.POINTER(Block)),
        ("embedding", Matrix),
        ("final_norm", _POINTER),
        ("vocabulary", Matrix),
        *_fields(_POINTER, "cosines sines"),
        *_fields(ctypes.c_float, "epsilon scaling"),
        *_fields(_INT, "num_blocks hidden heads kv_heads head_size inner by_tiles is_bf16"),
        *_fields(_INT, "rank depths"),
    ]


class Cache(ctypes.Structure):
    """A session's buffers."""

    _fields_: ClassVar[_Fields] = [
        *_fields(_POINTER, "keys values hidden_slots waiting filled skipped"),
        *_fields(_INT, "num_skipped capacity rows"),
    ]


class Step(ctypes.Structure):
    """Lanes of one step."""

    _fields_: ClassVar[_Fields] = [
        *_fields(_POINTER, "tokens row slot runs residual logits executed seconds"),
        *_fields(_INT, "lanes first stop leaves shares_rows words"),
    ]


class OpenMP(ctypes.Structure):
    """What the kernel calls of the OpenMP that torch runs on."""

    _fields_: ClassVar[_Fields] = _fields(_POINTER, "parallel thread threads")


def pointers(tensors: list[Tensor | None]) -> Any:
    """An array of the tensors' addresses, NULL for None."""
    return (_POINTER * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
