"""Blocks of a model that lie on several devices: where each of them is."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from buddy.errors import ModelError


def find_spread(
    blocks: nn.ModuleList, around: Iterable[nn.Module]
) -> tuple[torch.device, ...] | None:
    """Where each block lies; None where all of them lie where the embedding is.

    Args:
        blocks: Of the model, in their order.
        around: The embedding, and what else is outside of the blocks.

    Raises:
        ModelError: A block is parted, a weight is on no device, or what is outside of the blocks,
            or the first of them, is not where the embedding is.
    """
    devices = [_devices(block) for block in blocks]
    home = devices[0].union(*map(_devices, around))
    if len(home.union(*devices)) == 1:
        return None
    if len(home) != 1 or any(len(each) != 1 for each in devices):
        raise ModelError(
            "a model on several devices needs each block whole, and its embedding, first block, "
            "final norm and head on one of them: load it by BuddyForCausalLM.from_pretrained with "
            'device="cuda:0,cuda:1"'
        )
    return tuple(each.pop() for each in devices)


def moved(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """These tensors on a device; those that are there stay as they are."""
    return tuple(tensor.to(device) for tensor in tensors)


def _devices(part: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*part.parameters(), *part.buffers())}
