"""The two cosine indicators: how far a block turns the residual, its own or the last one."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.wide import widened
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.passing import PassingKV


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
    run = _begin(backbone, ids)
    summed = torch.zeros(backbone.num_blocks, dtype=torch.float64)
    for block in range(backbone.num_blocks):
        before = run.hidden
        run.blocks(range(block, block + 1), None)
        cosine = torch.cosine_similarity(before.float(), run.hidden.float(), dim=-1)
        summed[block] = (1 - widened(cosine)).sum().cpu()
        on_block(block)
    return summed


@torch.no_grad()
def summary_cosine(
    backbone: Backbone,
    ids: Int[Tensor, "batch tokens"],
    on_block: Callable[[int], None] = lambda block: None,
) -> Float[Tensor, " blocks"]:
    """Sum over windows of `1 - cos` between their summaries with and without a block, float64.

    A window's summary is the mean over its tokens of the residual after the last block. It takes
    as many block passes as there are pairs of blocks.

    Args:
        backbone: Runs the blocks.
        ids: Without pads.
        on_block: Told of each block that has been left out.

    Source: paper, section 4.2.2, the first of its two cosine indicators.
    """
    run = _begin(backbone, ids)
    num_blocks, entering = backbone.num_blocks, []
    for block in range(num_blocks):
        entering.append(run.hidden)
        run.blocks(range(block, block + 1), None)
    whole = _summary(run, len(ids))
    summed = torch.zeros(num_blocks, dtype=torch.float64)
    for block, before in enumerate(entering):
        run.set_residual(before)
        run.blocks(range(block + 1, num_blocks), None)
        without = _summary(run, len(ids))
        summed[block] = (1 - torch.cosine_similarity(whole, without, dim=-1)).sum().cpu()
        on_block(block)
    return summed


def _begin(backbone: Backbone, ids: Int[Tensor, "batch tokens"]) -> BlockRun:
    ids = ids.to(backbone.device)
    lanes = Lanes.prompts([ids.shape[1]] * len(ids), backbone.device)
    return BlockRun(backbone, lanes, PassingKV(backbone.project, lanes), ids.flatten())


def _summary(run: BlockRun, windows: int) -> Float[Tensor, "batch hidden"]:
    return widened(run.hidden.view(windows, -1, run.hidden.shape[1])).mean(1)
