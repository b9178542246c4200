"""Memory for weights and caches: one stretch of the system's, in large pages or in small ones."""

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

LARGE_PAGE: Final = 2 << 20
"""Bytes of a large page on most machines."""
LINE: Final = 64
"""Bytes of a cache line."""
_AT_ONCE: Final = 32 * LARGE_PAGE
"""Bytes that `LargePages` asks the system for; those that nothing is written to take no memory."""
_HAS_LARGE: Final = hasattr(mmap, "MADV_HUGEPAGE")
_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: what is never written need not be there."""
_DONTNEED: Final = 4
"""MADV_DONTNEED of the C library, on Linux and macOS."""
_CGROUP: Final = Path("/sys/fs/cgroup")
Release = Callable[[Tensor], None]
"""Told of weights that are needed no longer, or not for now."""


def keep(weight: Tensor) -> None:
    """Release nothing: the weight lies in memory of its own."""


@contextmanager
def released_when_run(blocks: Iterable[nn.Module], release: Release) -> Iterator[None]:
    """Release each block's weights when it has run, within the context."""

    def release_all(block: nn.Module, *_: Any) -> None:
        for weight in block.parameters():
            release(weight)

    hooks = [block.register_forward_hook(release_all) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def in_format(parts: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Show all weights as zeros of a number format, which take no memory, within the context."""
    weights = {weight: weight.data for weight in parts.parameters()}
    for weight in weights:
        weight.data = torch.zeros(1, dtype=dtype, device=weight.device).expand(weight.shape)
    try:
        yield
    finally:
        for weight, numbers in weights.items():
            weight.data = numbers


def zeroed_memory(num_bytes: int, *, is_sparse: bool = False) -> Tensor:
    """Bytes of zeros from the system; [num_bytes], uint8.

    Pages are taken when they are first written. The memory is given back with the last tensor that
    lies in it.

    Args:
        num_bytes: How many.
        is_sparse: Most may never be written: pages are small, and there may be more bytes than the
            system has. Otherwise they are large where there are large ones.

    Raises:
        MemoryError: The system has none left.
    """
    if num_bytes < LARGE_PAGE or not _HAS_LARGE:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    mapped, begin = _mapped(num_bytes, is_sparse=is_sparse)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=begin)


def _mapped(num_bytes: int, *, is_sparse: bool = False) -> tuple[mmap.mmap, int]:
    """Memory of the system's, and the place in it from which so many bytes are in pages of a kind.

    Raises:
        MemoryError: The system has none left.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if is_sparse else 0)
    try:
        mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes:,} bytes left") from error
    mapped.madvise(mmap.MADV_NOHUGEPAGE if is_sparse else mmap.MADV_HUGEPAGE)
    return mapped, -torch.frombuffer(mapped, dtype=torch.uint8, count=1).data_ptr() % LARGE_PAGE


class LargePages:
    """Memory for tensors that come one after another, side by side, each at a cache line.

    Each has a storage of its own, so that what copies or pickles one takes nothing of the others.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._place = self._end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of these sizes, of any numbers.

        Raises:
            MemoryError: The system has no memory left.
        """
        count = math.prod(shape)
        if count == 0 or not _HAS_LARGE:
            return torch.empty(tuple(shape), dtype=dtype)
        lines = -(-count * dtype.itemsize // LINE) * LINE
        if self._memory is None or lines > self._end - self._place:
            size = max(lines, _AT_ONCE)
            self._memory, self._place = _mapped(size)
            self._end = self._place + size
        here, self._place = self._place, self._place + lines
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=here)
        return flat.view(*shape).detach()

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers here; a tensor that is not on the CPU stays where it is."""
        if tensor.device.type != "cpu":
            return tensor
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)


def free_bytes() -> float:
    """Bytes that this process can still have of the host's memory; infinite where nothing says."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        told = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * int(told["MemAvailable"].split()[0])
        with suppress(OSError, ValueError, KeyError):  # a container's limit; "max" is none
            limit, used = (int((_CGROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
            lines = (_CGROUP / "memory.stat").read_text().splitlines()
            cached = int(dict(line.split() for line in lines)["inactive_file"])
            free = min(free, limit - used + cached)
        return free
    return math.inf


def give_back(tensor: Tensor) -> range:
    """Give the whole pages of a contiguous tensor in the host's memory back to the system.

    They are read anew from the file that is mapped there, if any; on Linux they else are zeros.

    Returns:
        The addresses that were given back; none where the system knows no such call.
    """
    first, page = tensor.data_ptr(), mmap.PAGESIZE
    begin, end = -(-first // page) * page, (first + tensor.nbytes) // page * page
    if os.name != "posix" or end <= begin:
        return range(0)
    failed = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED
    )
    return range(0) if failed else range(begin, end)


def zero(tensor: Tensor) -> None:
    """Zero a contiguous tensor in the host's memory; its whole pages go back to the system."""
    flat, first = tensor.view(-1), tensor.data_ptr()
    gone = give_back(tensor) if sys.platform == "linux" else range(0)
    if not gone:
        flat.zero_()
        return
    flat[: (gone.start - first) // tensor.itemsize] = 0
    flat[(gone.stop - first) // tensor.itemsize :] = 0
