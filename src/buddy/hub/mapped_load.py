"""Weights that lie in a mapped file until each is converted: no model is held beside its copy."""

import ctypes
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from buddy.backbone.memory import give_back
from buddy.hub.weights import DTYPES, is_leftover, read_header, weight_files

_AT_ONCE: Final = 2**21
"""Weights that are copied at a time."""


class MappedWeights:
    """Weights that may lie in their files, whose pages are the file's own and may go at any time.

    None does before `map` is called.
    """

    def __init__(self) -> None:
        self._stretches: list[range] = []
        self._files: list[mmap.mmap] = []  # or others' memory might come to lie in a stretch

    def map(
        self, folder: Path, tensors: Mapping[str, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Map what a model's files hold in one number format.

        Args:
            folder: Of the model.
            tensors: As `open_weights` gives them: checked, and not read yet.
            dtype: The number format.

        Returns:
            Its tensors by name. What is written to them is seen by nobody else.
        """
        mapped: dict[str, Tensor] = {}
        for path in weight_files(folder):
            with path.open("rb") as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            begins, header = read_header(whole)
            for name in sorted(header.keys() & tensors.keys()):
                if is_leftover(name) or DTYPES[tensors[name].get_dtype()] != dtype:
                    continue
                shape = tuple(tensors[name].get_shape())
                at = begins + header[name]["data_offsets"][0]
                flat = torch.frombuffer(whole, dtype=dtype, count=math.prod(shape), offset=at)
                mapped[name] = flat.view(shape)
            self._files.append(whole)
            first = ctypes.addressof(ctypes.c_char.from_buffer(whole))
            self._stretches.append(range(first, first + len(whole)))
        return mapped

    def release(self, tensor: Tensor) -> None:
        """Give the pages of a tensor back; of one that lies elsewhere nothing happens.

        Its numbers are the file's again where something had been written to them.
        """
        if any(tensor.data_ptr() in stretch for stretch in self._stretches):
            give_back(tensor)

    def own(self, model: nn.Module) -> None:
        """Give what of a model is still mapped memory of its own."""
        made: dict[int, Tensor] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            first = tensor.data_ptr()
            if any(first in stretch for stretch in self._stretches):
                if first not in made:
                    made[first] = self._copy(tensor.detach())
                tensor.data = made[first]

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy; of what is copied, the pages are given back on the way."""
        copied = torch.empty_like(tensor)
        parts = (torch.split(whole.flatten(), _AT_ONCE) for whole in (copied, tensor))
        for target, source in zip(*parts, strict=True):
            target.copy_(source)
            self.release(source)
        return copied
