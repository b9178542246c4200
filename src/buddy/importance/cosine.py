"""Cosine importance (block influence): how far each block turns the residual that enters it."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.models.backbone import Backbone


@torch.no_grad()
def cosine_importance(
    backbone: Backbone, windows: Iterable[Int[Tensor, "batch tokens"]]
) -> Float[Tensor, " blocks"]:
    """Mean over tokens of `1 - cos(block input, block output)`, one dense pass.

    Args:
        backbone: The model.
        windows: Token ids without pads.

    Returns:
        One number a block, from 0 (does nothing) to 2, float32.

    Source: ShortGPT's block influence; the paper's cosine indicator.
    """
    total = torch.zeros(backbone.num_blocks, dtype=torch.float64)
    tokens = 0
    for ids in windows:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = backbone.embed(ids)
        rotary = backbone.rotary(hidden, positions)
        for block in range(backbone.num_blocks):
            mask = _causal(ids.shape[1], backbone.windows[block], ids.device)
            after = backbone.run_block(block, hidden, mask, positions, rotary, None)
            cosine = torch.cosine_similarity(hidden.float(), after.float(), dim=-1)  # [B, T]
            total[block] += (1 - cosine.double()).sum().cpu()
            hidden = after
        tokens += ids.numel()
    return (total / max(tokens, 1)).float()


def _causal(tokens: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or window >= tokens:
        return None
    slot = torch.arange(tokens, device=device)
    distance = slot[:, None] - slot
    return ((distance >= 0) & (distance < window))[None, None]
