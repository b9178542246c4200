"""One ranking of the blocks for a whole batch, made of the scores of its rows."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.depth.wide import widened


def share_ranking(
    scores: Float[Tensor, "batch blocks"],
    pinned: Sequence[int],
    asked: Bool[Tensor, " batch"],
) -> Float[Tensor, "batch blocks"]:
    """One ranking for all rows: the mean of their scores, each row's brought to the same scale.

    A row's scale is the mean and the deviation of its finite scores; a row whose finite scores are
    all equal has no say among them. An infinite score stands one deviation beyond the finite score
    that is farthest from the row's mean: it ranks first (or last) in its own row, and other rows
    can outvote it as they can any score.

    Args:
        scores: Unnormalised; higher is kept. Infinities are allowed. A NaN of a row that votes
            makes its block's shared score NaN, for `select_blocks` to refuse.
        pinned: Blocks that always run. Their scores mean nothing and are left out of the scale.
        asked: Rows that vote; a row that has ended is fed pads and has no say. Where no row is
            asked, all vote.

    Returns:
        The same scores in every row, float32.
    """
    num_blocks = scores.shape[1]
    free = torch.ones(num_blocks, dtype=torch.bool, device=scores.device)
    free[[block % num_blocks for block in pinned]] = False
    ranked = widened(scores.float())  # float64: the square of any float32 is finite
    measured = ranked.isfinite() & free  # [B, L]
    count = measured.sum(1, keepdim=True).clamp(min=1)
    mean = torch.where(measured, ranked, 0.0).sum(1, keepdim=True) / count
    distance = ranked - mean
    within = torch.where(measured, distance, 0.0)
    deviation = (within.square().sum(1, keepdim=True) / count).sqrt()
    unit = torch.where(deviation > 0, deviation, 1.0)
    beyond = within.abs().amax(1, keepdim=True) / unit + 1
    scaled = torch.where(ranked.isinf(), ranked.sign() * beyond, distance / unit)
    voting = scaled[asked] if bool(asked.any()) else scaled
    return voting.mean(0).float().expand_as(scores).contiguous()
