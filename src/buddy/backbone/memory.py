"""Memory for weights and caches: one stretch, in large pages where the system has them."""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

LARGE_PAGE: Final = 2 << 20
"""Bytes of a large page on most machines."""
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


def zeroed_memory(num_bytes: int) -> Tensor:
    """Bytes of zeros from the system, in large pages where there are any; [num_bytes], uint8.

    Pages are taken when they are first written. The memory is given back with the last tensor that
    lies in it.

    Raises:
        MemoryError: The system has none left.
    """
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes:,} bytes left") from error
    mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE_PAGE
    return whole[begin : begin + num_bytes]
