"""Reads weights into large pages of memory, each weight at the beginning of a cache line.

A file has its tensors side by side at any address, and a mapped file has small pages. A processor
then loads most vectors in two halves, and looks up addresses more often than weights are worth.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.memory import LINE, zeroed_memory
from buddy.errors import CheckpointError
from buddy.hub.weights import STORED, is_leftover, read_header, weight_files

_Read = tuple[Path, int, NDArray[np.uint8]]
"""A file, where in it a weight begins, and the bytes that it is read into."""
_MOST_THREADS: Final = 4


def read_aligned(folder: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model's files, in one stretch of memory.

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
    placed: dict[str, Tensor] = {}
    reads: list[_Read] = []
    at = 0
    for path in weight_files(folder):
        with path.open("rb", buffering=0) as file:
            begins, header = read_header(file)
        for name in sorted(header.keys() & shapes.keys(), key=lambda key: _begin(header[key])):
            place = memory[at : at + sizes[name]]
            reads.append((path, begins + _begin(header[name]), place))
            placed[name] = torch.from_numpy(place).view(dtypes[name]).view(shapes[name])
            at += -(-sizes[name] // LINE) * LINE
    each = -(-len(reads) // min(torch.get_num_threads(), _MOST_THREADS))
    shares = [reads[begin : begin + each] for begin in range(0, len(reads), each)]
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(_read_all, shares))
    return placed


def _begin(entry: Any) -> int:
    begin: int = entry["data_offsets"][0]
    return begin


def _read_all(reads: list[_Read]) -> None:
    """Fill places from files, each opened by this thread alone."""
    with ExitStack() as stack:
        files: dict[Path, FileIO] = {}
        for path, begin, place in reads:
            if path not in files:
                files[path] = stack.enter_context(FileIO(path))
            files[path].seek(begin)
            _read_into(files[path], place)


def _read_into(file: FileIO, place: NDArray[np.uint8]) -> None:
    view, at = place.data, 0
    while at < len(view):  # the system reads 2 GiB at once at most
        count = file.readinto(view[at:])
        if not count:
            raise CheckpointError(
                f"{file.name} ends in the middle of a weight: copy or fetch it again"
            )
        at += count
