"""The executable specification of the SLEB search: every candidate is run whole, every round."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.importance.indicators.skipping import skip_losses
from buddy.importance.search.sleb import SlebSearch


def sleb_search_whole(
    backbone: Backbone, windows: Int[Tensor, "windows tokens"], rounds: int, *, batch: int = 4
) -> SlebSearch:
    """What `sleb_search` finds, found the slow way: nothing shared, no bounds."""
    batches = torch.split(windows, batch)
    targets = len(windows) * (windows.shape[1] - 1)
    order: tuple[int, ...] = ()
    nll = [loss_without(backbone, batches, order)]
    for _ in range(rounds):
        block, loss = cheapest_whole(backbone, batches, order)
        order = (*order, block)
        nll.append(loss)
    return SlebSearch(order, tuple(total / targets for total in nll))


def cheapest_whole(
    backbone: Backbone, batches: Sequence[Int[Tensor, "_ tokens"]], removed: tuple[int, ...]
) -> tuple[int, float]:
    """One round: the block that costs least to lose on top of those gone, and the loss then."""
    candidates = [block for block in range(1, backbone.num_blocks - 1) if block not in removed]
    losses = {block: loss_without(backbone, batches, (*removed, block)) for block in candidates}
    best = min(candidates, key=lambda block: (losses[block], block))
    return best, losses[best]


def loss_without(
    backbone: Backbone, batches: Sequence[Int[Tensor, "_ tokens"]], removed: tuple[int, ...]
) -> float:
    """Summed loss of the model that is left."""
    wholes = [skip_losses(backbone, ids, (), removed)[0] for ids in batches]
    return sum(float(losses.double().sum()) for losses in wholes)
