"""Block influence: how far each block turns the residual, in one dense pass."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.state.cache import PassingKV
from buddy.engine.state.lanes import Lanes


@torch.no_grad()
def block_influence(
    backbone: Backbone,
    ids: Int[Tensor, "batch tokens"],
    on_block: Callable[[int], None] = lambda block: None,
) -> Float[Tensor, " blocks"]:
    """Sum over tokens of `1 - cos(block input, block output)`, float64.

    The last block's output is taken before the final norm.

    Args:
        backbone: Runs the blocks.
        ids: Without pads.
        on_block: Told of each block that has run.

    Source: ShortGPT; the second of the paper's two cosine indicators.
    """
    ids = ids.to(backbone.device)
    lanes = Lanes.prompts([ids.shape[1]] * len(ids), backbone.device)
    run = BlockRun(backbone, lanes, PassingKV(backbone.project, lanes), ids.flatten())
    summed = torch.zeros(backbone.num_blocks, dtype=torch.float64)
    for block in range(backbone.num_blocks):
        before = run.hidden
        run.blocks(range(block, block + 1), None)
        cosine = torch.cosine_similarity(before.float(), run.hidden.float(), dim=-1)
        summed[block] = (1 - cosine.double()).sum()
        on_block(block)
    return summed
