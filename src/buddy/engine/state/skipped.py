"""Residuals that passed blocks by, and who still waits for them: what `lazy` keeps.

A residual is stored once for all neighbouring blocks that a row skips; each of these notes its
place. When one of the blocks next runs, its keys and values are made of what it notes.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.engine.state.timeline import Timeline

_FIRST_PLACES: Final = 64
_NOBODY: Final = -1


class PassedResiduals:
    """An arena of residuals, and for each block, row and slot the place of the one it waits for.

    Attributes:
        stored: [places, hidden]; None before the first. The first `count` are in use.
        count: Places in use.
        waiting: [blocks, batch, capacity] int32, a place, or -1 where nothing is waited for. On
            the host, like `filled`: what a step must fill is known without asking the device.
        filled: [blocks, batch]: no slot before this one waits.
    """

    def __init__(self, num_blocks: int, timeline: Timeline) -> None:
        self.stored: Tensor | None = None
        self.count = 0
        self.filled = np.zeros((num_blocks, timeline.batch), dtype=np.int32)
        self._timeline = timeline
        self._kept: dict[int, int] = {}
        self._step = -1
        shape = (num_blocks, timeline.batch, timeline.capacity)
        self.waiting = torch.full(shape, _NOBODY, dtype=torch.int32)

    def fit(self) -> None:
        """Grow with the timeline."""
        missing = self._timeline.capacity - self.waiting.shape[2]
        if missing > 0:
            self.waiting = torch.nn.functional.pad(self.waiting, (0, missing), value=_NOBODY)

    def room(self, places: int, like: Tensor) -> None:
        """Make room for more residuals: drop those that nobody waits for, or else grow."""
        if self.stored is None:
            size = max(_FIRST_PLACES, places)
            self.stored = torch.empty(size, like.shape[-1], dtype=like.dtype, device=like.device)
        if self.count + places <= len(self.stored):
            return
        self._compact()
        if self.count + places > len(self.stored) // 2:
            larger = self.stored.new_empty(2 * (self.count + places), self.stored.shape[1])
            larger[: self.count] = self.stored[: self.count]
            self.stored = larger

    def _compact(self) -> None:
        assert self.stored is not None
        waits = self.waiting >= 0
        places, renamed = torch.unique(self.waiting[waits], return_inverse=True)
        self.waiting[waits] = renamed.int()
        self.stored[: len(places)] = self.stored[places.long()]
        self.count = len(places)
        self._kept = {}  # their places are others now

    def keep(
        self, block: int, rows: Sequence[int], hidden: Float[Tensor, "batch tokens hidden"]
    ) -> None:
        """Note that rows pass a block by; their residual is stored unless it already is."""
        timeline = self._timeline
        tokens, start, stop = hidden.shape[1], timeline.start, timeline.length
        self.fit()
        if self._step != start:
            self._step, self._kept = start, {}
        self.room(len(rows) * tokens, hidden)  # before looking: places may be renamed
        assert self.stored is not None
        new = [row for row in rows if row not in self._kept]
        if new:
            chosen = hidden if len(new) == len(hidden) else hidden[new]
            end = self.count + len(new) * tokens
            self.stored[self.count : end] = chosen.detach().flatten(0, 1)
            self._kept |= {row: self.count + at * tokens for at, row in enumerate(new)}
            self.count = end
        column = torch.arange(tokens, dtype=torch.int32)
        first = torch.tensor([self._kept[row] for row in rows], dtype=torch.int32)
        places = first[:, None] + column
        if timeline.step_has_pads:
            valid = timeline.valid[:, start:stop].cpu()[list(rows)]
            places = torch.where(valid, places, _NOBODY)
        self.waiting[block, list(rows), start:stop] = places

    def due(
        self, block: int, rows: Sequence[int], stop: int
    ) -> tuple[Int[Tensor, " holes"], Int[Tensor, " holes"], Float[Tensor, "holes hidden"]] | None:
        """What rows wait for in a block before a slot: row, slot, residual; then they no longer do.

        None, at no cost, where nothing can be. Slots of the current step from `stop` on are the
        block's own to write.
        """
        for row in rows:
            self._kept.pop(row, None)  # what they run changes their residual
        behind = [row for row in rows if self.filled[block, row] < stop]
        low = min((int(self.filled[block, row]) for row in behind), default=stop)
        self.filled[block, list(rows)] = self._timeline.length
        if not behind:
            return None
        self.fit()
        which = torch.tensor(behind)
        place = self.waiting[block, which, low:stop]
        index, slot = (place >= 0).nonzero(as_tuple=True)
        if len(index) == 0:
            return None
        self.waiting[block, which, low:stop] = _NOBODY
        assert self.stored is not None
        return which[index], slot + low, self.stored[place[index, slot].long()]

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep the rows named, in that order; what they wait for is shared."""
        rows = rows.cpu()
        self.waiting = self.waiting[:, rows].contiguous()
        self.filled = np.ascontiguousarray(self.filled[:, rows.numpy()])
        self._kept = {}

    def cut(self, length: int) -> None:
        """Forget slots from `length` on."""
        self.waiting[:, :, length:] = _NOBODY
        np.minimum(self.filled, length, out=self.filled)
        self._step, self._kept = -1, {}

    def num_bytes(self) -> int:
        """Of the residuals in use, and of the notes."""
        width = 0 if self.stored is None else self.stored.shape[1] * self.stored.itemsize
        return self.count * width + self.waiting.nbytes
