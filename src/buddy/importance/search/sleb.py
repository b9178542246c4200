"""SLEB: greedy search for a removal order, one block a round, by calibration loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import PolicyError
from buddy.importance.search.bounded import Cheapest, Losses, Pruning
from buddy.resume import ResumeFile, fingerprint

OnRound = Callable[[int, int, float], None]
"""Called as `on_round(blocks removed so far, the last of them, mean NLL per token)`."""
OnCandidate = Callable[[int, int], None]
"""Called as `on_candidate(candidates run in this round, of how many)`, over all batches."""


@dataclass(frozen=True, slots=True)
class SlebSearch:
    """What the search found.

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
    batch: int = 4,
    pruning: Pruning | None = None,
    resume: Path | None = None,
    identity: dict[str, Any] | None = None,
    on_round: OnRound = lambda number, block, nll: None,
    on_candidate: OnCandidate = lambda done, total: None,
) -> SlebSearch:
    """Remove, round by round, the block whose absence costs least on top of those gone.

    The first and the last block stay. Blocks before a candidate are computed once for all
    candidates of a round, and few candidates need their loss computed in full; neither changes
    the result.

    Args:
        backbone: The model.
        windows: Calibration text without pads.
        rounds: Blocks to remove.
        batch: Windows at a time.
        pruning: What to spend on not computing losses.
        resume: File that keeps what was found, however the search stops short; the caller deletes
            it once the result is kept.
        identity: What the search depends on (model ...); a file of another one is refused.
        on_round: Told of each block removed, at once of those that the resume file has.
        on_candidate: Told of progress within a round.

    Raises:
        PolicyError: More rounds than blocks that may go.
        ResultError: The resume file is damaged, belongs to another search, or cannot be written.

    Source: SLEB; the sharing and the bounds are ours.
    """
    num_blocks = backbone.num_blocks
    check_rounds(rounds, num_blocks)
    batches = torch.split(windows, batch)
    targets = len(windows) * (windows.shape[1] - 1)
    about = {"search": "sleb", "batch": batch, **(identity or {})}
    file = ResumeFile(resume, {**about, "text": fingerprint(windows)})
    found = _Found.read(file, num_blocks, len(batches))
    for number, block in enumerate(found.order[:rounds], start=1):
        on_round(number, block, found.nll[number] / targets)
    cheapest = Cheapest(backbone, batches, pruning or Pruning())
    if not found.nll or len(found.order) < rounds:
        # Read or not: the pass also sets up the bounds.
        found = replace(found, nll=(cheapest.whole_loss(), *found.nll[1:]))
    try:
        while len(found.order) < rounds:
            found = found.without(*_next_block(cheapest, found, file, on_candidate))
            file.write(found.tensors())
            on_round(len(found.order), found.order[-1], found.nll[-1] / targets)
    except BaseException:
        # Whatever stops the search, Ctrl-C above all: no candidate that was run is run again.
        file.write(found.tensors())
        raise
    nll = [loss / targets for loss in found.nll[: rounds + 1]]
    return SlebSearch(found.order[:rounds], tuple(nll))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search has found so far, in the middle of a round too; summed losses.

    Never changed but for `losses`, whose numbers come one by one: an interrupt leaves it whole.
    """

    order: tuple[int, ...]
    nll: tuple[float, ...]
    losses: Losses

    @classmethod
    def read(cls, file: ResumeFile, num_blocks: int, num_batches: int) -> "_Found":
        found = file.read("order", "nll", "bound", "exact")
        if found is None:
            return cls((), (), Losses.unknown(num_blocks, num_batches))
        losses = Losses(found["bound"], found["exact"])
        return cls(tuple(found["order"].tolist()), tuple(found["nll"].tolist()), losses)

    def tensors(self) -> dict[str, Tensor]:
        return {
            "order": torch.tensor(self.order, dtype=torch.long),
            "nll": torch.tensor(self.nll, dtype=torch.float64),
            "bound": self.losses.bound,
            "exact": self.losses.exact,
        }

    def without(self, block: int, loss: float) -> "_Found":
        """With one more block gone."""
        unknown = Losses.unknown(*self.losses.bound.shape)
        return _Found((*self.order, block), (*self.nll, loss), unknown)


def _next_block(
    cheapest: Cheapest, found: _Found, file: ResumeFile, on_candidate: OnCandidate
) -> tuple[int, float]:
    num_blocks, num_batches = found.losses.bound.shape
    candidates = [block for block in range(1, num_blocks - 1) if block not in found.order]
    total = len(candidates) * num_batches
    done = total - sum(
        len(found.losses.unvisited(candidates, batch)) for batch in range(num_batches)
    )
    on_candidate(done, total)

    def ran() -> None:
        nonlocal done
        done += 1
        on_candidate(done, total)
        file.write_if_due(found.tensors)

    return cheapest.find(candidates, found.order, found.losses, on_candidate=ran)
