"""Reads weights into large pages of memory, each weight at the beginning of a cache line.

A file has its tensors side by side at any address, and a mapped file has small pages. A processor
then loads most vectors in two halves, and looks up addresses more often than weights are worth.
"""

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.memory import LINE, zeroed_memory
from buddy.errors import CheckpointError
from buddy.hub.weights import STORED, is_leftover, read_header, weight_files

_HAS_PLACED_READS: Final = hasattr(os, "preadv")
"""Not so on Windows, where one thread reads at a time."""
_MOST_THREADS: Final = 4 if _HAS_PLACED_READS else 1
"""That read at once; more would hardly read faster."""


def read_aligned(folder: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model's files, in one stretch of memory, read by several threads.

    Each has a storage of its own, so that what copies or pickles one takes nothing of the others.

    Args:
        folder: Of the model.
        tensors: As `open_weights` gives them: checked, and not read yet.

    Raises:
        CheckpointError: A file has been cut short since.
    """
    weights = {name: tensor for name, tensor in tensors.items() if not is_leftover(name)}
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in weights.items()}
    dtypes = {name: STORED[tensor.get_dtype()] for name, tensor in weights.items()}
    sizes = {name: math.prod(shapes[name]) * dtypes[name].itemsize for name in shapes}
    memory = zeroed_memory(sum(-(-size // LINE) * LINE for size in sizes.values())).numpy()
    threads = min(torch.get_num_threads(), _MOST_THREADS)
    placed: dict[str, Tensor] = {}
    at = 0
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(threads) as pool:
            begins, header = read_header(file)
            reads: list[tuple[int, NDArray[np.uint8]]] = []
            for name in sorted(header.keys() & shapes.keys(), key=lambda key: _begin(header[key])):
                place = memory[at : at + sizes[name]]
                reads.append((begins + _begin(header[name]), place))
                placed[name] = torch.from_numpy(place).view(dtypes[name]).view(shapes[name])
                at += -(-sizes[name] // LINE) * LINE
            # Where one fails, or an interrupt comes, what has not begun is not read.
            list(pool.map(partial(_read_into, file), *zip(*reads, strict=True)))
    return placed


def _begin(entry: Any) -> int:
    begin: int = entry["data_offsets"][0]
    return begin


def _read_into(file: Any, begin: int, place: NDArray[np.uint8]) -> None:
    view, at = place.data, 0
    while at < len(view):  # the system reads 2 GiB at once at most
        count = _read_at(file, begin + at, view[at:])
        if not count:
            raise CheckpointError(
                f"{file.name} ends in the middle of a weight: copy or fetch it again"
            )
        at += count


def _read_at(file: Any, begin: int, view: memoryview) -> int:
    if _HAS_PLACED_READS:
        return os.preadv(file.fileno(), [view], begin)
    file.seek(begin)
    count: int = file.readinto(view)
    return count
