"""A mark of some tensors, which is another one when a tensor is replaced, moved or written."""

from collections.abc import Iterable

from torch import Tensor


def mark_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Identity, address and version of each; what was made under `inference_mode` has no version.

    Writing through `.data`, or into a tensor without a version, leaves the mark as it is.
    """
    mark: list[int] = []
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        mark += (id(tensor), tensor.data_ptr(), version)
    return tuple(mark)
