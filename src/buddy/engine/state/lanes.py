"""Lanes: the new tokens of one pass, and some of them as a rectangle that blocks can take."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import LaneSet, on_device


@dataclass(frozen=True, eq=False)
class Lanes:
    """The new tokens of one pass. A lane is one new token of one sequence.

    The lanes of a sequence stand side by side, in the order of their slots. A token's slot in the
    cache is also its position.

    Attributes:
        rows: Row of the cache of each sequence that takes part.
        starts: Slot of each sequence's first new token.
        counts: New tokens of each sequence, at least one.
        device: Where the tokens are.
        num: New tokens of all sequences.
        is_one_each: Whether every sequence has one new token: a decode step.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    device: torch.device
    num: int = field(init=False)
    is_one_each: bool = field(init=False)

    @classmethod
    def prompts(cls, counts: Sequence[int], device: torch.device) -> "Lanes":
        """Whole sequences from their first token on, each in a row of its own."""
        return cls(tuple(range(len(counts))), (0,) * len(counts), tuple(counts), device)

    def __post_init__(self) -> None:
        # What a decode step asks for is made at once, as `cached_property` locks.
        num, known = sum(self.counts), self.__dict__
        known["num"], known["is_one_each"] = num, num == len(self.rows)
        if num == len(self.rows):
            known["row"] = np.array(self.rows, np.int32)
            known["slot"] = np.array(self.starts, np.int32)
            known["last"] = np.arange(num)

    def at(self, device: torch.device) -> "Lanes":
        """The same lanes for blocks that lie on this device, made once."""
        if device == self.device:
            return self
        twins: dict[torch.device, Lanes] = self.__dict__.setdefault("_twins", {})
        if device not in twins:
            twins[device] = Lanes(self.rows, self.starts, self.counts, device)
        return twins[device]

    @property
    def stops(self) -> tuple[int, ...]:
        """Length of each sequence after the pass."""
        return tuple(s + c for s, c in zip(self.starts, self.counts, strict=True))

    @cached_property
    def sequence(self) -> NDArray[np.int64]:
        """The place in `rows` of each lane's sequence."""
        return np.repeat(np.arange(len(self.rows)), self.counts)

    @cached_property
    def row(self) -> NDArray[np.int32]:
        """The row of the cache of each lane."""
        return np.repeat(np.array(self.rows, np.int32), self.counts)

    @cached_property
    def slot(self) -> NDArray[np.int32]:
        """The slot of each lane, which is its position."""
        first = np.repeat(np.array(self.starts), self.counts)
        return (first + np.arange(self.num) - self.first[self.sequence]).astype(np.int32)

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """The first lane of each sequence."""
        return np.cumsum((0, *self.counts[:-1]))

    @cached_property
    def last(self) -> NDArray[np.int64]:
        """The last lane of each sequence."""
        return np.cumsum(self.counts) - 1

    @cached_property
    def whole(self) -> "Frame":
        """All lanes as a rectangle."""
        return Frame(self, None)


class Frame:
    """Some lanes of a pass as a rectangle [sequences, tokens], padded on the right.

    Args:
        lanes: Of the pass.
        chosen: At least one of them.

    Attributes:
        rows: Rows of the cache: a slice where they are neighbours, so that nothing is copied.
        slots: [sequences, tokens], of each place; pads repeat their sequence's first.
        stop: The slot after the last one of all.
        pads: [sequences, tokens], True where no lane is; None where there is no such place.
    """

    def __init__(self, lanes: Lanes, chosen: LaneSet) -> None:
        self.lanes, self.chosen = lanes, chosen
        self.device = lanes.device
        if chosen is None:
            rows, counts = lanes.rows, np.array(lanes.counts)
            slots = lanes.slot
        else:
            present, counts = np.unique(lanes.sequence[chosen], return_counts=True)
            rows, slots = tuple(lanes.rows[place] for place in present), lanes.slot[chosen]
        self.counts = counts
        self.num_rows, self.width = len(rows), int(counts.max())
        self.row_numbers = rows
        column = np.arange(self.width)
        self._real = column < counts[:, None]
        is_ragged = not bool(self._real.all())
        first = np.cumsum(np.concatenate(([0], counts[:-1])))
        # Places among the chosen; a pad stands for its sequence's first lane.
        place = first[:, None] + np.where(self._real, column, 0)
        self.slots = slots[place]
        self.stop = int(self.slots.max()) + 1
        self.stops = self.slots.max(1) + 1
        self._place = place if chosen is None else chosen[place]
        self.is_all = chosen is None and not is_ragged
        """All lanes of the pass, and no pads: laying them out copies nothing."""
        is_range = rows == tuple(range(rows[0], rows[0] + len(rows)))
        self.rows: slice | Tensor = (
            slice(rows[0], rows[0] + len(rows))
            if is_range
            else on_device(np.array(rows), lanes.device)
        )
        self.pads: Bool[Tensor, "sequences tokens"] | None = (
            on_device(~self._real, lanes.device) if is_ragged else None
        )
        self.is_level = not is_ragged and bool((self.slots == self.slots[0]).all())
        """Every sequence has the same slots."""
        self.is_run = self.is_level and int(self.slots[0, -1] - self.slots[0, 0]) == self.width - 1
        """The same slots, and they are neighbours."""
        self._is_prefix = bool((self.slots == np.where(self._real, column, 0)).all())
        self._masks: dict[int | None, Tensor | None] = {}

    @cached_property
    def index(self) -> Int[Tensor, " places"]:
        """The lane of each place."""
        return on_device(self._place.ravel(), self.device)

    @cached_property
    def positions(self) -> Int[Tensor, "sequences tokens"]:
        """The position of each place."""
        return on_device(self.slots.astype(np.int64), self.device)

    @cached_property
    def real(self) -> tuple[Int[Tensor, " chosen"], Int[Tensor, " chosen"]]:
        """Row and column in the rectangle of each lane that is in it."""
        row, column = self._real.nonzero()
        return on_device(row, self.device), on_device(column, self.device)

    def spread(self, values: Shaped[Tensor, "lanes ..."]) -> Shaped[Tensor, "rows tokens ..."]:
        """Values of all lanes as values of the places, [sequences, tokens, ...]."""
        shape = (self.num_rows, self.width, *values.shape[1:])
        return values.view(shape) if self.is_all else values[self.index].view(shape)

    def merge(
        self, into: Shaped[Tensor, "lanes ..."], made: Shaped[Tensor, "rows tokens ..."]
    ) -> Shaped[Tensor, "lanes ..."]:
        """Values of all lanes, those in the rectangle replaced by what was made of them."""
        if self.is_all:
            return made.flatten(0, 1)
        flat = made.flatten(0, 1) if self.pads is None else made[self.real]
        if self.chosen is None:
            return flat
        return into.index_copy(0, on_device(self.chosen, self.device), flat)

    def mask(self, window: int | None) -> Bool[Tensor, "sequences 1 tokens slots"] | None:
        """Who sees which slots, for a block with this sliding window.

        None where plain causality says it all: new tokens from the first slot on, or one new token
        each that sees every slot.
        """
        if window not in self._masks:
            is_plain = self._is_prefix or (self.width == 1 and self.is_level)
            in_window = window is None or self.stop <= window
            self._masks[window] = None if is_plain and in_window else self.full_mask(window)
        return self._masks[window]

    def full_mask(self, window: int | None) -> Bool[Tensor, "sequences 1 tokens slots"]:
        """The mask, spelled out."""
        distance = self.positions[..., None] - torch.arange(self.stop, device=self.device)
        seen = distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        return seen[:, None]
