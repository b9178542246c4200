"""Which device each part of a model is loaded to: blocks in their order, by shares of bytes."""

from bisect import bisect
from itertools import accumulate
from typing import Any

import torch

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError
from buddy.hub.weights import empty_model


def map_devices(
    config: Any, devices: tuple[torch.device, ...], dtype: torch.dtype
) -> dict[str, torch.device]:
    """Places of a model's parts, as transformers' `device_map`.

    The first device has all but blocks, and the first block. Of the bytes of all weights each
    device has a share as large as its share of free memory, to the nearest block. Caches follow
    their blocks.

    Args:
        config: Of the model.
        devices: One for the whole model, or several of CUDA.
        dtype: Of the weights.

    Raises:
        ModelError: The weights are more than a device has memory for, or a device gets no block.
    """
    if devices[0].type != "cuda":
        return {"": devices[0]}
    backbone = Backbone(empty_model(config))
    counts = [sum(p.numel() for p in block.parameters()) for block in backbone.blocks]
    sizes = [count * dtype.itemsize for count in counts]
    around = backbone.shape().outside_params * dtype.itemsize
    free = list(map(_free_bytes, devices))
    *begins, total = accumulate(sizes, initial=around)
    middles = [begin + size / 2 for begin, size in zip(begins, sizes, strict=True)]
    ends = [end * total / sum(free) for end in accumulate(free)]
    # Routers read the first block's keys and values.
    places = [0, *(bisect(ends, middle) for middle in middles[1:])]
    _check(devices, free, places, sizes, around)
    if len(devices) == 1:
        return {"": devices[0]}
    family = backbone.family
    inside = (family.embedding, family.rotary, family.final_norm)
    names = [family.head, *(f"{family.backbone}.{name}" for name in inside)]
    stack = f"{family.backbone}.{family.blocks}"
    return dict.fromkeys(names, devices[0]) | {
        f"{stack}.{block}": devices[place] for block, place in enumerate(places)
    }


def _free_bytes(device: torch.device) -> int:
    """What torch can still allocate: what nobody has, and what it keeps of earlier models."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _check(
    devices: tuple[torch.device, ...],
    free: list[int],
    places: list[int],
    sizes: list[int],
    around: int,
) -> None:
    """Refuse places that do not fit, or that leave a device with nothing to do."""
    for at, device in enumerate(devices):
        own = sum(size for size, place in zip(sizes, places, strict=True) if place == at)
        if own == 0:
            raise ModelError(
                f"device {device} would have none of the model's {len(sizes)} blocks: name fewer "
                "devices"
            )
        needed = own + (around if at == 0 else 0)
        if needed > free[at]:
            raise ModelError(
                f"{needed / 1e9:.1f} GB of weights do not fit the {free[at] / 1e9:.1f} GB that are "
                f"free on {device}: name more devices, such as cuda:0,cuda:1, or load it on one "
                'with quant="int8"'
            )
