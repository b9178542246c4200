"""Cosine importance (block influence): how far each block turns the residual that enters it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.importance.dense import Windows
from buddy.models.backbone import Backbone


@torch.no_grad()
def cosine_importance(
    backbone: Backbone, ids: Int[Tensor, "batch tokens"]
) -> Float[Tensor, " blocks"]:
    """Mean over tokens of `1 - cos(block input, block output)`, one dense pass.

    Args:
        backbone: The model.
        ids: Windows without pads.

    Returns:
        One number a block, from 0 (does nothing) to 2, float64.

    Source: ShortGPT's block influence; the paper's cosine indicator.
    """
    windows = Windows.of(backbone, ids)
    turned = torch.zeros(backbone.num_blocks, dtype=torch.float64)
    for block, before, after in windows.run(range(backbone.num_blocks), windows.embedded):
        cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1)  # [B, T]
        turned[block] = (1 - cosine.double()).mean()
    return turned
