"""Residuals of tokens that skipped blocks, and who still waits for them: what `lazy` keeps.

A residual is stored once for all neighbouring blocks that a token skips; each of these notes its
place. When one of the blocks next runs, its keys and values are made of what it notes. Of a model
on several devices, a residual is stored where it is, and moved when a block needs it.
"""

from collections.abc import Sequence
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
_SHIFT: Final = 26
"""A place has the number of its device above as many bits, and its index there below."""


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
        stored: Of each device that has some, residuals [places, hidden].
        counts: Of each, its places in use, the first of them.
        waiting: [blocks, rows, slots], a place, or -1 where nothing is waited for; on the host.
        filled: [blocks, rows]: no slot before this one waits.
        addresses: Where `waiting` and `filled` lie, for compiled code.
    """

    stored: Sequence[Tensor]
    counts: list[int]
    waiting: NDArray[np.int32]
    filled: NDArray[np.int32]
    addresses: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.addresses = self.waiting.ctypes.data, self.filled.ctypes.data

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has addresses of its own."""
        return Arena, (self.stored, self.counts, self.waiting, self.filled)

    def device_number(self, like: Tensor) -> int:
        """The number of a tensor's device: that of a new one where nothing is stored there yet."""
        devices = [stored.device for stored in self.stored]
        return devices.index(like.device) if like.device in devices else len(devices)


class SkippedResiduals:
    """An arena of residuals, and for each block, row and slot the place of the one it waits for.

    Args:
        num_blocks: Blocks of the model.
        rows: Rows of the cache.
        capacity: Slots of each row.
    """

    def __init__(self, num_blocks: int, rows: int, capacity: int) -> None:
        waiting = np.full((num_blocks, rows, capacity), NOBODY, np.int32)
        self.arena = Arena((), [], waiting, np.zeros((num_blocks, rows), np.int32))
        self._left = 0
        """Tokens that have left since room was last given back."""

    def fit(self, rows: int, capacity: int) -> None:
        """Grow with the cache."""
        arena, (_, had_rows, had_slots) = self.arena, self.arena.waiting.shape
        if had_rows >= rows and had_slots >= capacity:
            return
        more = ((0, 0), (0, max(0, rows - had_rows)), (0, max(0, capacity - had_slots)))
        waiting = np.pad(arena.waiting, more, constant_values=NOBODY)
        filled = np.pad(arena.filled, more[:2])
        self.arena = Arena(arena.stored, arena.counts, waiting, filled)

    def room(self, places: int, like: Float[Tensor, "*lanes hidden"]) -> bool:
        """Make room for more residuals: drop those that nobody waits for, or else grow.

        Returns:
            Whether places were renamed.
        """
        arena = self.arena
        number = arena.device_number(like)
        if number == len(arena.stored):
            size = max(_FIRST_PLACES, places)
            with torch.inference_mode(False):  # a session may go on outside of it
                stored = torch.empty(size, like.shape[-1], dtype=like.dtype, device=like.device)
            both = (*arena.stored, stored), [*arena.counts, 0]
            self.arena = Arena(*both, arena.waiting, arena.filled)
            return False
        if arena.counts[number] + places <= len(arena.stored[number]):
            return False
        self._compact(number, places)
        return True

    def trim(self, left: int) -> None:
        """Give room back that sequences have left behind, where it may be half of it.

        All notes are looked through for it.

        Args:
            left: Tokens of those that leave now.
        """
        self._left += left
        for number, stored in enumerate(self.arena.stored):
            if _FIRST_PLACES < len(stored) <= 2 * self._left:
                with suppress(MemoryError, RuntimeError):  # without room to move, all stays
                    self._compact(number, 0)
                self._left = 0

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compact(self, number: int, places: int) -> None:
        arena, old = self.arena, self.arena.stored[number]
        waits = arena.waiting >> _SHIFT == number
        wanted, renamed = np.unique(_index(arena.waiting[waits]), return_inverse=True)
        waiting = arena.waiting.copy()
        waiting[waits] = renamed | number << _SHIFT
        needed = len(wanted) + places
        size = len(old)
        if needed > size // 2:
            size = 2 * needed
        elif 4 * needed < size > _FIRST_PLACES:  # a long prompt has gone: give its room back
            size = max(_FIRST_PLACES, 2 * needed)
        new = old.new_empty(size, old.shape[1])
        new[: len(wanted)] = old[on_device(wanted, old.device)]
        stored, counts = list(arena.stored), arena.counts.copy()
        stored[number], counts[number] = new, len(wanted)
        self.arena = Arena(stored, counts, waiting, arena.filled)

    def store(self, hidden: Float[Tensor, "lanes hidden"]) -> NDArray[np.int32]:
        """Keep residuals for which `room` was made; their places."""
        arena = self.arena
        number = arena.device_number(hidden)
        start, stop = arena.counts[number], arena.counts[number] + len(hidden)
        arena.stored[number][start:stop] = hidden.detach()
        arena.counts[number] = stop
        return np.arange(start, stop, dtype=np.int32) | number << _SHIFT

    def holes(
        self, block: int, rows: NDArray[np.int64], stops: NDArray[np.int64], device: torch.device
    ) -> Holes | None:
        """What rows wait for in a block before a slot; None, at no cost, where nothing can be.

        Args:
            block: Whose keys and values are to be made.
            rows: Of the cache.
            stops: Of each row, the first slot that is not asked for.
            device: Where the residuals are wanted.
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
        return Holes(rows[index], slot + low, self._residuals(place[index, slot], device))

    def _residuals(
        self, places: NDArray[np.int32], device: torch.device
    ) -> Float[Tensor, "places hidden"]:
        """What is stored at these places, on whichever devices, on one."""
        parts, order = [], []
        for number, stored in enumerate(self.arena.stored):
            of_device = np.flatnonzero(places >> _SHIFT == number)
            if len(of_device):
                index = _index(places[of_device]).astype(np.int64)
                parts.append(stored[on_device(index, stored.device)].to(device))
                order.append(of_device)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[on_device(np.argsort(np.concatenate(order)), device)]

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
        twin.arena = Arena(arena.stored, arena.counts.copy(), waiting, filled)
        return twin

    def copy(self, source: int, row: int, length: int) -> None:
        """Let a row wait for what another one waits for, before a slot; residuals are shared."""
        waiting, filled = self.arena.waiting, self.arena.filled
        waiting[:, row, :length] = waiting[:, source, :length]
        filled[:, row] = np.minimum(filled[:, source], length)

    def cut(self, row: int, length: int, stop: int) -> None:
        """Forget a row's slots from `length` on; from `stop` on there is nothing."""
        self.arena.waiting[:, row, length:stop] = NOBODY
        filled = self.arena.filled[:, row]
        np.minimum(filled, length, out=filled)

    def num_bytes(self) -> int:
        """Bytes of the residuals in use, and of the notes."""
        used = zip(self.arena.stored, self.arena.counts, strict=True)
        return sum(stored[:count].nbytes for stored, count in used) + self.arena.waiting.nbytes


def _index(places: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where they are among those of their device."""
    return places & (1 << _SHIFT) - 1
