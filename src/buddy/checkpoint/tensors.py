"""Tensors of a checkpoint: whole, and finite."""

from pathlib import Path

from torch import Tensor

from buddy.errors import CheckpointError, reason, shown
from buddy.hub.safe_paths import file_inside
from buddy.hub.weights import DTYPES


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Every tensor of a safetensors file.

    Raises:
        CheckpointError: The file may not be read or is damaged, or a number is NaN or infinite:
            blocks would be ranked by nothing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = file_inside(folder, name)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, TypeError, RuntimeError) as error:  # shapes beyond torch's
        raise CheckpointError(
            f"{path} is damaged ({reason(error)}): copy the checkpoint again"
        ) from error
    for key, tensor in tensors.items():
        # Of shorter formats torch cannot even ask whether a number is finite.
        if tensor.dtype not in DTYPES.values() or not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{path}: {shown(key, 200)[1:-1]} holds what is no finite number: copy the "
                "checkpoint again, or train it again"
            )
    return tensors
