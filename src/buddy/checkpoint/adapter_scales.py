"""Puts scales by depth on the adapters of a checkpoint that is loaded, merged or not."""

from pathlib import Path
from typing import Any

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthLinear, DepthScales, attach_scales, scaled_layers
from buddy.checkpoint.adapter import WEIGHTS, read_adapter_config
from buddy.checkpoint.parts import base_of_adapted
from buddy.checkpoint.tensors import read_tensors
from buddy.errors import CheckpointError, ModelError


def put_scales(hf_model: Any, folder: Path, scales: DepthScales, *, is_merged: bool) -> None:
    """Let a model's adapters know the depth.

    Args:
        hf_model: Wrapped by PEFT, or with the adapter merged.
        folder: Of the adapter.
        scales: By depth.
        is_merged: Whether it is merged.

    Raises:
        CheckpointError: The adapter is no plain LoRA, or the scales are of others.
    """
    config = read_adapter_config(folder)
    if not config.is_plain:
        raise CheckpointError(
            f"{folder} is no plain LoRA of one rank and scale, which scales by depth are of: copy "
            "the checkpoint again"
        )
    backbone = Backbone(base_of_adapted(hf_model))
    if not is_merged:
        try:
            attach_scales(backbone, scales)
        except ModelError as error:
            raise CheckpointError(f"{folder}: {error}: copy the checkpoint again") from error
        return
    weights, layers = read_tensors(folder, WEIGHTS), scaled_layers(backbone)
    names = {module: name for name, module in hf_model.named_modules()}
    if (len(layers), config.r) != (scales.config.layers, scales.config.rank):
        raise CheckpointError(
            f"{folder}: scales by depth are of {scales.config.layers} adapters of rank "
            f"{scales.config.rank}, and these are {len(layers)} of rank {config.r}: copy the "
            "checkpoint again"
        )
    for place, layer in enumerate(layers.values()):
        name = names[layer]
        down, up = (weights.get(f"base_model.model.{name}.lora_{side}.weight") for side in "AB")
        if down is None or up is None:
            raise CheckpointError(
                f"{folder} has no adapter on {name}, which has scales by depth: copy the "
                "checkpoint again"
            )
        device = next(iter((*layer.parameters(), *layer.buffers()))).device
        down, up = down.to(device, backbone.dtype), (up.float() * config.scaling).to(device)
        made = DepthLinear(layer, down, up.to(backbone.dtype), scales, place)
        hf_model.set_submodule(name, made)
