"""The device that a model is loaded to: the one that is named, or the first that can be had."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from buddy.errors import ModelError, reason, shown

VARIABLE: Final = "BUDDY_DEVICE"
"""The environment variable that names a device for all that is loaded without one."""
_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""What Linux says of an NVIDIA driver; it is there if, and only if, one is loaded."""


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device to load to.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None for what the environment variable BUDDY_DEVICE
            names, else the first CUDA device, else the CPU.

    Raises:
        ModelError: It is no device or is not there; or none was named, and torch cannot use a GPU
            that is there: a CPU would be taken in its place without a word.
    """
    if device is None:
        device = os.environ.get(VARIABLE) or None
    if device is not None:
        return _named(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    fault = _driver_fault()
    if fault is not None:
        raise ModelError(
            f"this machine has an NVIDIA GPU that torch {torch.__version__} cannot use ({fault}): "
            "update its driver, or name the device cpu"
        )
    return torch.device("cpu")


def _named(device: str | torch.device) -> torch.device:
    found: torch.device | None = None
    with suppress(RuntimeError):
        found = torch.device(device)
    if found is None or found.type not in ("cpu", "cuda", "mps"):
        raise ModelError(
            f"no model can be loaded to {shown(str(device), 40)}: expected cpu, cuda, cuda:1 or mps"
        )
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            fault = _driver_fault()
            raise ModelError(
                f"device {found} is not there: torch {torch.__version__} finds {count} CUDA devices"
                + (f" ({fault})" if fault else "")
            )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError(f"device {found} is not there: torch finds no Apple GPU")
    return found


def _driver_fault() -> str | None:
    """Why a GPU that is there cannot be used; None where there is none, or it is hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or not _DRIVER.exists():
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's own
    except (RuntimeError, AssertionError) as error:
        return reason(error)
    return None
