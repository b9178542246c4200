"""The widest number format of a device: Apple's GPUs know no float64."""

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """Float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def widened(values: Tensor) -> Tensor:
    """A copy in the widest number format of its device."""
    return values.to(widest_float(values.device), copy=True)
