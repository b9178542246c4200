"""The scales by depth of new adapters, as a recipe names their depths."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthScales, DepthScalesConfig, attach_scales, scaled_layers
from buddy.budget.request import read_blocks
from buddy.checkpoint.manifest import read_manifest
from buddy.checkpoint.parts import ROUTING_FILE, base_of_adapted
from buddy.checkpoint.tensors import read_tensors
from buddy.errors import RecipeError
from buddy.training.router.recipe import LoraSettings, Recipe


def depths_in_blocks(settings: LoraSettings, num_blocks: int) -> tuple[int, ...]:
    """The depths at which adapters have scales of their own.

    Raises:
        BudgetError: The model cannot spend one.
        RecipeError: They do not rise, or are one.
    """
    depths = [read_blocks(budget).blocks(num_blocks) for budget in settings.depths]
    if depths and (len(depths) < 2 or depths != sorted(set(depths))):
        raise RecipeError(
            f"lora.depths must be two budgets or more, rising, got {', '.join(settings.depths)}, "
            f"which are {', '.join(map(str, depths))} blocks of {num_blocks}"
        )
    return tuple(depths)


def check_depths(recipe: Recipe, num_blocks: int) -> None:
    """Refuse depths that a model cannot have, or a router that is asked after the first block.

    Raises:
        BudgetError: The model cannot spend one.
        RecipeError: They do not fit.
    """
    depths_in_blocks(recipe.lora, num_blocks)
    layer = recipe.router.planner.context_layer
    if recipe.lora.depths and recipe.router.policy == "routed" and layer > 1:
        raise RecipeError(
            "lora.depths are known to adapters from the second block on, and "
            f"router.planner.context_layer is {layer}: set it to 1, or leave one of the two out"
        )


def new_scales(adapted: nn.Module, settings: LoraSettings, num_blocks: int) -> DepthScales | None:
    """Scales of 1 on new adapters; None where the recipe names no depths."""
    depths = depths_in_blocks(settings, num_blocks)
    if not depths:
        return None
    backbone = Backbone(base_of_adapted(adapted))
    layers = len(scaled_layers(backbone))
    scales = DepthScales(DepthScalesConfig(depths=depths, layers=layers, rank=settings.rank))
    attach_scales(backbone, scales)
    return scales


def start_scales(scales: DepthScales | None, checkpoint: Path) -> None:
    """Go on from the scales of a checkpoint's adapters, if it has any; its files were checked.

    Raises:
        RecipeError: It has some, and the new adapters have none or others.
    """
    before = read_manifest(checkpoint).depth_scales
    if before is None:
        return
    if scales is None or scales.config != before:
        shown = ", ".join(f'"{depth} blocks"' for depth in before.depths)
        raise RecipeError(
            f"lora.start: the adapters of {checkpoint} know the depth at {shown}: set lora.depths "
            f"to [{shown}]"
        )
    weight: Any = read_tensors(checkpoint, ROUTING_FILE)["depth_scales.weight"]
    with torch.no_grad():
        scales.weight.copy_(weight)
