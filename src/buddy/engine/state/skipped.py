"""Residuals of tokens that skipped blocks, and who still waits for them: what `lazy` keeps.

A residual is stored once for all neighbouring blocks that a token skips; each of these notes its
place. When one of the blocks next runs, its keys and values are made of what it notes.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import on_device

_FIRST_PLACES: Final = 64
NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Holes:
    """What a block waits for, and the residuals that it is to be made of.

    Attributes:
        rows, slots: Of each hole, ascending by row.
        hidden: Its residual.
    """

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    hidden: Float[Tensor, "holes hidden"]


@dataclass(slots=True)
class Arena:
    """Residuals and the notes that name their places; replaced together, in one assignment.

    Attributes:
        stored: [places, hidden], residuals; None before the first.
        waiting: [blocks, rows, slots], a place, or -1 where nothing is waited for; on the host.
        filled: [blocks, rows]: no slot before this one waits.
        count: Places in use, the first of them.
        addresses: Where `waiting` and `filled` lie, for compiled code.
    """

    stored: Tensor | None
    waiting: NDArray[np.int32]
    filled: NDArray[np.int32]
    count: int
    addresses: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.addresses = self.waiting.ctypes.data, self.filled.ctypes.data

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has addresses of its own."""
        return Arena, (self.stored, self.waiting, self.filled, self.count)


class SkippedResiduals:
    """An arena of residuals, and for each block, row and slot the place of the one it waits for.

    Args:
        num_blocks: Blocks of the model.
        rows: Rows of the cache.
        capacity: Slots of each row.
    """

    def __init__(self, num_blocks: int, rows: int, capacity: int) -> None:
        waiting = np.full((num_blocks, rows, capacity), NOBODY, np.int32)
        self.arena = Arena(None, waiting, np.zeros((num_blocks, rows), np.int32), 0)

    def fit(self, rows: int, capacity: int) -> None:
        """Grow with the cache."""
        arena, (_, had_rows, had_slots) = self.arena, self.arena.waiting.shape
        if had_rows >= rows and had_slots >= capacity:
            return
        more = ((0, 0), (0, max(0, rows - had_rows)), (0, max(0, capacity - had_slots)))
        waiting = np.pad(arena.waiting, more, constant_values=NOBODY)
        self.arena = Arena(arena.stored, waiting, np.pad(arena.filled, more[:2]), arena.count)

    def room(self, places: int, like: Float[Tensor, "*lanes hidden"]) -> bool:
        """Make room for more residuals: drop those that nobody waits for, or else grow.

        Returns:
            Whether places were renamed.
        """
        arena = self.arena
        if arena.stored is None:
            size = max(_FIRST_PLACES, places)
            with torch.inference_mode(False):  # a session may go on outside of it
                stored = torch.empty(size, like.shape[-1], dtype=like.dtype, device=like.device)
            self.arena = Arena(stored, arena.waiting, arena.filled, 0)
            return False
        if arena.count + places <= len(arena.stored):
            return False
        self._compact(places)
        return True

    def trim(self) -> None:
        """Give room back that sequences have left behind."""
        if self.arena.stored is not None and len(self.arena.stored) > _FIRST_PLACES:
            with suppress(MemoryError, RuntimeError):  # without room to move, all stays where it is
                self._compact(0)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compact(self, places: int) -> None:
        arena = self.arena
        assert arena.stored is not None
        waits = arena.waiting >= 0
        wanted, renamed = np.unique(arena.waiting[waits], return_inverse=True)
        waiting = arena.waiting.copy()
        waiting[waits] = renamed
        needed = len(wanted) + places
        size = len(arena.stored)
        if needed > size // 2:
            size = 2 * needed
        elif 4 * needed < size > _FIRST_PLACES:  # a long prompt has gone: give its room back
            size = max(_FIRST_PLACES, 2 * needed)
        stored = arena.stored.new_empty(size, arena.stored.shape[1])
        stored[: len(wanted)] = arena.stored[on_device(wanted, stored.device)]
        self.arena = Arena(stored, waiting, arena.filled, len(wanted))

    def store(self, hidden: Float[Tensor, "lanes hidden"]) -> NDArray[np.int32]:
        """Keep residuals for which `room` was made; their places."""
        arena = self.arena
        assert arena.stored is not None
        start, stop = arena.count, arena.count + len(hidden)
        arena.stored[start:stop] = hidden.detach()
        arena.count = stop
        return np.arange(start, stop, dtype=np.int32)

    def holes(self, block: int, rows: NDArray[np.int64], stops: NDArray[np.int64]) -> Holes | None:
        """What rows wait for in a block before a slot; None, at no cost, where nothing can be.

        Args:
            block: Whose keys and values are to be made.
            rows: Of the cache.
            stops: Of each row, the first slot that is not asked for.
        """
        arena = self.arena
        behind = arena.filled[block, rows] < stops
        if not behind.any():
            return None
        rows, stops = rows[behind], stops[behind]
        low, high = int(arena.filled[block, rows].min()), int(stops.max())
        place = arena.waiting[block, rows, low:high]
        asked = (place >= 0) & (np.arange(low, high) < stops[:, None])
        index, slot = asked.nonzero()
        if len(index) == 0:
            return None
        assert arena.stored is not None
        which = on_device(place[index, slot].astype(np.int64), arena.stored.device)
        return Holes(rows[index], slot + low, arena.stored[which])

    def close(
        self,
        block: int,
        rows: NDArray[np.int64],
        stops: NDArray[np.int64],
        holes: Holes | None,
    ) -> None:
        """Note that nothing waits before these slots any more: their keys and values are made."""
        if holes is not None:
            self.arena.waiting[block, holes.rows, holes.slots] = NOBODY
        filled = self.arena.filled
        filled[block, rows] = np.maximum(filled[block, rows], stops)

    def select_rows(self, rows: NDArray[np.int64]) -> "SkippedResiduals":
        """Those of the rows named, in that order; the residuals are shared."""
        arena = self.arena
        twin = SkippedResiduals(len(arena.filled), 0, 0)
        waiting = np.ascontiguousarray(arena.waiting[:, rows])
        filled = np.ascontiguousarray(arena.filled[:, rows])
        twin.arena = Arena(arena.stored, waiting, filled, arena.count)
        return twin

    def copy(self, source: int, row: int, length: int) -> None:
        """Let a row wait for what another one waits for, before a slot; residuals are shared."""
        waiting, filled = self.arena.waiting, self.arena.filled
        waiting[:, row, :length] = waiting[:, source, :length]
        filled[:, row] = np.minimum(filled[:, source], length)

    def cut(self, row: int, length: int) -> None:
        """Forget a row's slots from `length` on."""
        self.arena.waiting[:, row, length:] = NOBODY
        filled = self.arena.filled[:, row]
        np.minimum(filled, length, out=filled)

    def num_bytes(self) -> int:
        """Bytes of the residuals in use, and of the notes."""
        stored = self.arena.stored
        width = 0 if stored is None else stored.shape[1] * stored.itemsize
        return self.arena.count * width + self.arena.waiting.nbytes
