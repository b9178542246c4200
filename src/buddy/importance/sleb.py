"""SLEB: greedy search for a removal order, one block a round, by calibration loss."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from buddy.errors import PolicyError
from buddy.importance.skipping import skip_losses
from buddy.models.backbone import Backbone

OnRound = Callable[[int, int, float], None]
"""Called as `on_round(round, block removed, mean NLL per token)`."""


@dataclass(frozen=True, slots=True)
class SlebSearch:
    """What the search found.

    Attributes:
        order: Blocks in the order they went.
        nll: Mean negative log-likelihood per token after each round; the first is of the whole.
    """

    order: tuple[int, ...]
    nll: tuple[float, ...]


def sleb_search(
    backbone: Backbone,
    batches: Sequence[Tensor],
    rounds: int,
    *,
    on_round: OnRound = lambda number, block, nll: None,
) -> SlebSearch:
    """Remove, round by round, the block whose absence costs least on top of those gone.

    The first and the last block stay. Blocks before a candidate are computed once for all
    candidates of a round, which changes no result.

    Args:
        backbone: The model.
        batches: Calibration windows without pads, [batch, tokens] each; the last may be smaller.
        rounds: Blocks to remove.
        on_round: Told of each block removed.

    Raises:
        PolicyError: More rounds than blocks that may go.

    Source: SLEB; the sharing is ours.
    """
    num_blocks = backbone.num_blocks
    if not 0 <= rounds <= num_blocks - 2:
        raise PolicyError(
            f"SLEB can remove 0 to {num_blocks - 2} of {num_blocks} blocks, got {rounds} rounds"
        )
    targets = sum(len(ids) * (ids.shape[1] - 1) for ids in batches)
    removed: list[int] = []
    whole = sum(skip_losses(backbone, ids, ())[0] for ids in batches)
    nll = [whole / targets]
    for number in range(rounds):
        candidates = [b for b in range(1, num_blocks - 1) if b not in removed]
        best, loss = _cheapest(backbone, batches, candidates, removed)
        removed.append(best)
        nll.append(loss / targets)
        on_round(number + 1, best, nll[-1])
    return SlebSearch(tuple(removed), tuple(nll))


def _cheapest(
    backbone: Backbone,
    batches: Sequence[Tensor],
    candidates: Sequence[int],
    removed: Collection[int],
) -> tuple[int, float]:
    """The candidate with the lowest summed loss; ties go to the shallower block."""
    sums = dict.fromkeys(candidates, 0.0)
    for ids in batches:
        _, losses = skip_losses(backbone, ids, candidates, removed)
        for block, loss in losses.items():
            sums[block] += loss
    best = min(candidates, key=lambda block: (sums[block], block))
    return best, sums[best]
