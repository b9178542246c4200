"""The structures that the kernel reads, field by field as in model.h."""

import ctypes
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
ZEROS, HIDDEN, RESIDUAL, PROJECTED = range(4)
QUANTISED: Final = {"int8": INT8, "int4": INT4}
FORMATS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

_Fields = list[tuple[str, Any]]
_POINTER: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int32


class Matrix(ctypes.Structure):
    """Weights [rows, columns] in one of the four formats."""

    _fields_: ClassVar[_Fields] = [
        *((name, _POINTER) for name in ("weights", "scales", "bias")),
        *((name, _INT) for name in ("rows", "columns", "format", "by_dots")),
    ]


class Block(ctypes.Structure):
    """Weights of one block."""

    _fields_: ClassVar[_Fields] = [
        *((n, Matrix) for n in ("query", "key", "value", "output", "gate", "up", "down")),
        *((n, _POINTER) for n in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("window", _INT),
    ]


class Model(ctypes.Structure):
    """Weights and sizes."""

    _fields_: ClassVar[_Fields] = [
        ("blocks", ctypes.POINTER(Block)),
        ("embedding", _POINTER),
        ("final_norm", _POINTER),
        ("vocabulary", Matrix),
        ("cosines", _POINTER),
        ("sines", _POINTER),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
        *(
            (name, _INT)
            for name in (
                "num_blocks",
                "hidden",
                "heads",
                "kv_heads",
                "head_size",
                "inner",
                "by_tiles",
                "is_bf16",
            )
        ),
    ]


class Cache(ctypes.Structure):
    """A session's buffers."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, _POINTER)
            for name in (
                "keys",
                "values",
                "hidden_slots",
                "waiting",
                "filled",
                "skipped",
            )
        ),
        *((name, _INT) for name in ("num_skipped", "capacity", "rows")),
    ]


class Step(ctypes.Structure):
    """Lanes of one step."""

    _fields_: ClassVar[_Fields] = [
        *(
            (name, _POINTER)
            for name in (
                "tokens",
                "row",
                "slot",
                "runs",
                "residual",
                "logits",
                "executed",
                "seconds",
            )
        ),
        *((name, _INT) for name in ("lanes", "first", "stop", "leaves", "shares_rows", "words")),
    ]


class OpenMP(ctypes.Structure):
    """What the kernel calls of the OpenMP that torch runs on."""

    _fields_: ClassVar[_Fields] = [(name, _POINTER) for name in ("parallel", "thread", "threads")]


def pointers(tensors: list[Tensor | None]) -> Any:
    """An array of the tensors' addresses, NULL for None."""
    return (_POINTER * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
