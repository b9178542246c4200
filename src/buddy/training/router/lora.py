"""LoRA on all linear layers of the blocks, by PEFT; weights in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import find_family
from buddy.checkpoint.adapter import FOLDER, WEIGHTS, read_adapter_config
from buddy.checkpoint.listed_files import check_files
from buddy.checkpoint.manifest import check_base, read_manifest
from buddy.checkpoint.tensors import read_tensors
from buddy.drawn import drawn_by
from buddy.errors import ModelError, RecipeError
from buddy.hub.quiet import quiet_peft
from buddy.training.router.recipe import LoraSettings


def add_lora(
    model: nn.Module, settings: LoraSettings, seed: int, without: Sequence[str] = ()
) -> nn.Module:
    """Freeze the model and wrap it by PEFT; without a rank, freeze alone.

    Args:
        model: Without adapters.
        settings: Of the adapters.
        seed: Of their start.
        without: Names of linear layers that get none.

    Raises:
        ModelError: The model has adapters already, or is a mixture of experts.
    """
    if hasattr(model, "peft_config"):
        raise ModelError(
            "the model has a LoRA adapter already: train from its base model, or load it with "
            "merge_adapter=True"
        )
    model.requires_grad_(False)
    if settings.rank == 0:
        return model
    if find_family(model.config).mixture:
        raise ModelError(
            "LoRA on a mixture of experts is not supported: PEFT would adapt its experts too, also "
            "where they are to stay; set lora.rank = 0 to train the router alone"
        )
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(Any, settings.alpha),
        lora_dropout=settings.dropout,
        target_modules="all-linear",
        exclude_modules=list(without) or None,
        task_type="CAUSAL_LM",
    )
    with drawn_by(seed), quiet_peft():
        return cast(nn.Module, get_peft_model(cast(Any, model), config))


def start_adapters(
    model: nn.Module,
    checkpoint: Path,
    base: Backbone,
    fingerprint: str | None,
    settings: LoraSettings,
) -> None:
    """Give new adapters the weights of a checkpoint's.

    Args:
        model: With adapters as `settings` say.
        checkpoint: Of Buddy.
        base: The model that the new adapters are on.
        fingerprint: Of its source.
        settings: Of the new adapters.

    Raises:
        CheckpointError: The checkpoint is damaged, or of another base model.
        RecipeError: It has no adapters, or they are of another rank or scale, or on other layers.
    """
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest.files)
    check_base(checkpoint, manifest.base, base, fingerprint)
    folder = checkpoint / FOLDER
    if not (folder / WEIGHTS).is_file():
        raise RecipeError(f"lora.start: {checkpoint} has no adapters: leave it out")
    saved = {
        name.removesuffix(".weight") + ".default.weight": weights
        for name, weights in read_tensors(folder, WEIGHTS).items()
    }
    own = {name: weights for name, weights in model.named_parameters() if ".lora_" in name}
    if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in own.items()}:
        raise RecipeError(
            f"lora.start: the adapters of {checkpoint} have another rank or other layers than "
            "this recipe's: set lora.rank and lora.keep_context as they were there"
        )
    then, scale = read_adapter_config(folder), settings.alpha / settings.rank
    if not then.is_plain:
        raise RecipeError(
            f"lora.start: the adapters of {checkpoint} are no plain LoRA of one rank and scale: "
            "leave it out"
        )
    if then.scaling != scale:
        raise RecipeError(
            f"lora.start: the adapters of {checkpoint} are multiplied by {then.scaling:g} and this "
            f"recipe's by {scale:g}: set lora.alpha to {then.scaling * settings.rank:g}"
        )
    with torch.no_grad():
        for name, weights in own.items():
            weights.copy_(saved[name])


def context_layers(model: nn.Module, backbone: Backbone, context_layer: int) -> list[str]:
    """Names of the linear layers that make a router's context.

    They are the key and value projections of block `context_layer`, counted from 1, and all of the
    blocks before it.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = [
        names[module]
        for block in range(context_layer - 1)
        for module in backbone.blocks[block].modules()
        if isinstance(module, nn.Linear)
    ]
    last = context_layer - 1
    return [
        *layers,
        names[backbone.key_projection(last)],
        names[backbone.value_projection(last)],
    ]
