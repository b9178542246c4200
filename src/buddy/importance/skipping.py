"""What each block's absence costs: the loss without it, blocks before it computed once for all."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.importance.dense import Windows
from buddy.models.backbone import Backbone


@torch.no_grad()
def skip_losses(
    backbone: Backbone,
    ids: Int[Tensor, "batch tokens"],
    candidates: Collection[int],
    removed: Collection[int] = (),
) -> tuple[float, dict[int, float]]:
    """Loss of one batch of windows as it is, and without each candidate in turn.

    The pass that keeps every candidate is made once; each candidate continues from the residual
    that entered it, so on average half the blocks are run.

    Args:
        backbone: The model.
        ids: Windows without pads.
        candidates: Blocks to leave out, one at a time.
        removed: Blocks that are gone already.

    Returns:
        Summed negative log-likelihoods: of the whole pass, and by candidate.
    """
    windows = Windows.of(backbone, ids)
    kept = [block for block in range(backbone.num_blocks) if block not in set(removed)]
    losses = {}
    hidden = windows.embedded
    for block, before, after in windows.run(kept, windows.embedded):
        hidden = after
        if block in candidates:
            losses[block] = _continue(windows, [later for later in kept if later > block], before)
    return float(windows.nll(hidden)), losses


def _continue(
    windows: Windows, blocks: Sequence[int], hidden: Float[Tensor, "batch tokens hidden"]
) -> float:
    for _, _, after in windows.run(blocks, hidden):
        hidden = after
    return float(windows.nll(hidden))
