"""Losses of sets of blocks that differ little from a base: what they share is computed once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.importance.forward import Windows
from buddy.importance.search.bounded import BoundedLosses, Pruning
from buddy.lab.search.passages import Passages


class NearbyLosses(BoundedLosses):
    """Tells whether a set of blocks is better than a base, and runs no more than that takes.

    A pass starts from the base's residual at the first block in which the sets differ. A set whose
    loss over the likeliest tokens alone, which is never above the loss, is too high needs no other.
    Neither changes the result.

    Args:
        backbone: The model.
        batches: Text.
        pruning: What to spend.
    """

    def __init__(
        self, backbone: Backbone, batches: Sequence[Passages], pruning: Pruning | None = None
    ) -> None:
        super().__init__(backbone, pruning)
        self._batches = [_Batch(passages) for passages in batches]
        self._base: frozenset[int] = frozenset()
        self.blocks_run = 0
        """Blocks run so far, each over one batch."""

    @torch.no_grad()
    def rebase(self, kept: Collection[int]) -> float:
        """Take this set as the base; its summed loss."""
        self._base = frozenset(kept)
        room = self._pruning.keep_bytes
        losses = []
        for batch in self._batches:
            windows = self._windows(batch)
            batch.residuals = {}
            hidden = windows.embedded
            for block, before, after in windows.run(sorted(self._base), windows.embedded):
                hidden = after
                self.blocks_run += 1
                if before.nbytes <= room:
                    room -= before.nbytes
                    batch.residuals[block] = before
            if batch.vocabulary is None:
                batch.vocabulary = self.vocabulary(windows, hidden)
            losses.append(self.loss(windows, hidden))
        return sum(losses)

    @torch.no_grad()
    def below(self, kept: Collection[int], limit: float) -> float | None:
        """The summed loss of this set; None if it is not below the limit."""
        losses, residuals = [], []
        for batch in self._batches:
            windows = self._windows(batch)
            hidden = self._through(batch, windows, kept)
            if batch.vocabulary is None:
                losses.append(self.loss(windows, hidden))
            else:
                losses.append(self.bound(windows, hidden, batch.vocabulary))
            residuals.append(hidden)
            if sum(losses) >= limit:
                return None
        for place, (batch, hidden) in enumerate(zip(self._batches, residuals, strict=True)):
            if batch.vocabulary is not None:
                losses[place] = self.loss(self._windows(batch), hidden)
                if sum(losses) >= limit:
                    return None
        return sum(losses)

    def _windows(self, batch: "_Batch") -> Windows:
        return Windows.of(self._backbone, batch.text.ids, batch.text.counted)

    def _through(self, batch: "_Batch", windows: Windows, kept: Collection[int]) -> Tensor:
        """The residual after the last block, from the last one that the base has in common."""
        first = min(self._base.symmetric_difference(kept), default=self._backbone.num_blocks)
        # What enters the base's next block enters the first that differs, too.
        shared = min((block for block in self._base if block >= first), default=first)
        start = max((block for block in batch.residuals if block <= shared), default=0)
        hidden = batch.residuals.get(start, windows.embedded)
        rest = [block for block in sorted(kept) if block >= min(start, first)]
        self.blocks_run += len(rest)
        return windows.through(rest, hidden)


@dataclass(slots=True)
class _Batch:
    """A batch of text, and what is kept of the base's pass over it.

    Attributes:
        text: Its tokens.
        residuals: By block of the base, the residual that enters it.
        vocabulary: The likeliest tokens; None = no bounds.
    """

    text: Passages
    residuals: dict[int, Tensor] = field(default_factory=dict)
    vocabulary: Tensor | None = None
