"""The devices that a model is loaded to: those that are named, or the first that can be had."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from buddy.errors import ModelError, reason, shown

VARIABLE: Final = "BUDDY_DEVICE"
"""The environment variable that names a device for all that is loaded without one."""
ALL: Final = ("auto", "balanced")
"""Every CUDA device of the machine; the second is what transformers also calls it."""
_DRIVER: Final = Path("/proc/driver/nvidia/version")
"""What Linux says of an NVIDIA driver; it is there if, and only if, one is loaded."""


def pick_devices(device: str | torch.device | None) -> tuple[torch.device, ...]:
    """The devices to load to; several share the blocks of one model.

    Args:
        device: As `pick_device` takes it; or several CUDA devices, "cuda:0,cuda:1", the first of
            which has all but blocks; or "auto" for all of the machine.

    Raises:
        ModelError: As `pick_device`; or several are named that are not all CUDA's, or one twice.
    """
    if device is None:
        device = os.environ.get(VARIABLE) or None
    if device in ALL:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(torch.device("cuda", at) for at in range(count)) or (_first(),)
    if device is None or "," not in str(device):
        return (_first() if device is None else _named(device),)
    named = [_named(name.strip()) for name in str(device).split(",")]
    devices = tuple(torch.device(found.type, found.index or 0) for found in named)
    if {found.type for found in devices} != {"cuda"} or len(set(devices)) < len(devices):
        raise ModelError(
            f"a model's blocks are spread over CUDA devices, each named once, got "
            f"{shown(str(device), 80)}: expected names such as cuda:0,cuda:1"
        )
    return devices


def pick_device(device: str | torch.device | None) -> torch.device:
    """The one device to load to.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None for what the environment variable BUDDY_DEVICE
            names, else the first CUDA device, else the CPU.

    Raises:
        ModelError: It is no device or is not there, or is several; or none was named, and torch
            cannot use a GPU that is there: a CPU would be taken in its place without a word.
    """
    devices = pick_devices(device)
    if len(devices) > 1:
        raise ModelError(
            f"this takes one device, got {', '.join(map(str, devices))}: blocks are spread over "
            "several for inference alone, and not with quant; name one of them"
        )
    return devices[0]


def _first() -> torch.device:
    """The first CUDA device, else the CPU."""
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
    """The device of this name, which is there."""
    found: torch.device | None = None
    with suppress(RuntimeError, TypeError):
        found = torch.device(device)
    if found is None or found.type not in ("cpu", "cuda", "mps"):
        raise ModelError(
            f"no model can be loaded to {shown(str(device), 40)}: expected cpu, cuda, "
            "cuda:1 or mps, several such as cuda:0,cuda:1, or auto for all of CUDA"
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
