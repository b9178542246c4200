"""SLEB: greedy search for a removal order, one block a round, by calibration loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import PolicyError
from buddy.importance.search.bounded import Cheapest, Losses, SearchWork
from buddy.importance.work import BATCH, resume_file
from buddy.processes import ALONE
from buddy.resume import ResumeFile

OnRound = Callable[[int, int, float], None]
"""Called as `on_round(blocks removed so far, the last of them, mean NLL per token)`."""
OnCandidate = Callable[[int, int], None]
"""Called as `on_candidate(candidates run in this round, of how many)`, over all batches."""


@dataclass(frozen=True, slots=True)
class SlebSearch:
    """What a SLEB search found.

    Attributes:
        order: Blocks in the order they went.
        nll: Mean negative log-likelihood per token after each round; the first is of the whole.
    """

    order: tuple[int, ...]
    nll: tuple[float, ...]


def check_rounds(rounds: int, num_blocks: int) -> None:
    """Refuse to remove more blocks than there are between the ends.

    Raises:
        PolicyError: More rounds than that, or a negative number.
    """
    most = max(0, num_blocks - 2)
    if not 0 <= rounds <= most:
        raise PolicyError(
            f"SLEB can remove 0 to {most} of {num_blocks} blocks, got {rounds} rounds"
        )


def sleb_search(
    backbone: Backbone,
    windows: Int[Tensor, "windows tokens"],
    rounds: int,
    *,
    on_round: OnRound = lambda number, block, nll: None,
    on_candidate: OnCandidate = lambda done, total: None,
    **work: Unpack[SearchWork],
) -> SlebSearch:
    """Remove, round by round, the block whose absence costs least on top of those gone.

    The first and the last block stay. Blocks before a candidate are computed once for all
    candidates of a round, and few candidates need their loss computed in full; neither changes
    the result.

    Args:
        backbone: The model.
        windows: Calibration text without pads.
        rounds: Blocks to remove.
        on_round: Told of each block removed, at once of those that the resume file has.
        on_candidate: Told of progress within a round.
        **work: See `SearchWork`.

    Raises:
        PolicyError: More rounds than blocks that may go.
        ResultError: The resume file is damaged, belongs to another search, or cannot be written.

    Source: SLEB; the sharing and the bounds are ours.
    """
    num_blocks = backbone.num_blocks
    check_rounds(rounds, num_blocks)
    batches = torch.split(windows, work.get("batch", BATCH))
    targets = len(windows) * (windows.shape[1] - 1)
    file = resume_file(windows, {"search": "sleb"}, work)
    ranks = work.get("ranks", ALONE)
    progress = ranks.from_writer(lambda: _Progress.read(file, num_blocks, len(batches)))
    for number, block in enumerate(progress.order[:rounds], start=1):
        on_round(number, block, progress.nll[number] / targets)
    cheapest = Cheapest(backbone, batches, work.get("pruning"), ranks)
    if not progress.nll or len(progress.order) < rounds:
        # Read or not: the pass also sets up the bounds.
        progress = replace(progress, nll=(cheapest.whole_loss(), *progress.nll[1:]))
    try:
        while len(progress.order) < rounds:
            progress = progress.without(*_next_block(cheapest, progress, file, on_candidate))
            file.write(progress.tensors())
            on_round(len(progress.order), progress.order[-1], progress.nll[-1] / targets)
    except BaseException:
        # Whatever stops the search, Ctrl-C above all: no candidate that was run is run again.
        file.write(progress.tensors())
        raise
    nll = [loss / targets for loss in progress.nll[: rounds + 1]]
    return SlebSearch(progress.order[:rounds], tuple(nll))


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a search has found so far, in the middle of a round too; summed losses.

    Never changed but for `losses`, whose numbers come one by one: an interrupt leaves it whole.
    """

    order: tuple[int, ...]
    nll: tuple[float, ...]
    losses: Losses

    @classmethod
    def read(cls, file: ResumeFile, num_blocks: int, num_batches: int) -> "_Progress":
        fresh = cls((), (), Losses.unknown(num_blocks, num_batches))
        if (earlier := file.read(fresh.tensors())) is None:
            return fresh
        saved = earlier.tensors
        order = saved["order"].tolist()
        if len(set(order) & set(range(1, num_blocks - 1))) < len(order):
            raise file.damaged(f"it says that blocks {order} are gone")
        nll = saved["nll"].tolist()
        if len(nll) != len(order) + 1 and (nll or order):
            raise file.damaged(f"it has {len(nll)} losses for {len(order)} blocks")
        return cls(tuple(order), tuple(nll), Losses(saved["bound"], saved["exact"]))

    def tensors(self) -> dict[str, Tensor]:
        return {
            "order": torch.tensor(self.order, dtype=torch.long),
            "nll": torch.tensor(self.nll, dtype=torch.float64),
            "bound": self.losses.bound,
            "exact": self.losses.exact,
        }

    def without(self, block: int, loss: float) -> "_Progress":
        """The state of the search once one more block is gone."""
        unknown = Losses.unknown(*self.losses.bound.shape)
        return _Progress((*self.order, block), (*self.nll, loss), unknown)


def _next_block(
    cheapest: Cheapest, progress: _Progress, file: ResumeFile, on_candidate: OnCandidate
) -> tuple[int, float]:
    num_blocks, num_batches = progress.losses.bound.shape
    candidates = [block for block in range(1, num_blocks - 1) if block not in progress.order]
    total = len(candidates) * num_batches
    done = total - sum(
        len(progress.losses.unvisited(candidates, batch)) for batch in range(num_batches)
    )
    on_candidate(done, total)

    def ran() -> None:
        nonlocal done
        done += 1
        on_candidate(done, total)
        file.write_if_due(progress.tensors)

    return cheapest.find(candidates, progress.order, progress.losses, on_candidate=ran)
