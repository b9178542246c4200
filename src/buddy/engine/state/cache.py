"""KV cache of a model whose blocks do not all run: what a skipped block leaves behind.

Every sequence has a row, and every block has the same rows and slots; a token's slot is its
position. A block that a token skips leaves, in that row and slot: zeros (`zero`), a hole that later
queries cannot see (`mask`), keys and values projected from the residual that passed by (`project`),
or that residual itself, projected in one batch when the block next runs (`lazy`).

Slots from a sequence's length on are scratch: a pass that fails leaves nothing but them behind.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.memory import free_bytes, zero, zeroed_memory
from buddy.depth.plan import LaneSet
from buddy.engine.probe import GATHER_SCATTER, piece
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.skipped import NOBODY, SkippedResiduals
from buddy.engine.state.view import BlockKV, Projector, lane_index
from buddy.errors import ModelError, PolicyError

KVPolicy = Literal["zero", "mask", "project", "lazy"]
KV_POLICIES = get_args(KVPolicy)
DEFAULT_KV_POLICY: KVPolicy = "lazy"
_WORTH_ASKING: Final = 2**24
"""Bytes of a pass that may be more than the host has: it is asked for no fewer."""
_WORTH_GIVING_BACK: Final = 2**16
"""Bytes of a row's keys in a block: to give less back takes longer than to zero it."""


def check_kv_policy(kv_policy: str) -> KVPolicy:
    """Refuse what is no KV policy.

    Raises:
        PolicyError: It is none of the four.
    """
    if kv_policy not in KV_POLICIES:
        raise PolicyError(f"kv_policy must be one of {', '.join(KV_POLICIES)}, got {kv_policy!r}")
    return cast(KVPolicy, kv_policy)


def rung(number: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on: less than half as much again."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 else power


class BlockKVCache(BlockKV):
    """Keys and values of every block, in buffers [rows, heads, slots, head] that grow when full.

    Args:
        num_blocks: Blocks of the model.
        rows: Sequences that there is room for at first.
        capacity: Slots of each row at first.
        kv_policy: What a skipped block leaves behind.
        project: Makes keys and values from residuals; `project` and `lazy` need it.
        devices: Where each block's buffers are; the tokens are where the first block's are.
        dtype: Of keys and values, whatever autocast makes of them on their way.

    Attributes:
        revision: Changes when a buffer is another one.
        written: [rows], slots that may have been written. Those behind them take no memory on the
            host, so that rows may be of very different lengths.
    """

    def __init__(
        self,
        num_blocks: int,
        rows: int,
        capacity: int,
        kv_policy: KVPolicy,
        project: Projector,
        devices: Sequence[torch.device],
        dtype: torch.dtype,
    ) -> None:
        self.rows, self.capacity, self.dtype = rows, capacity, dtype
        self.devices, self.device = devices, devices[0]
        self.kv_policy = check_kv_policy(kv_policy)
        self._project = project
        self._keys: list[Tensor | None] = [None] * num_blocks
        self._values: list[Tensor | None] = [None] * num_blocks
        keeps = kv_policy in ("project", "lazy")
        self.skipped = SkippedResiduals(num_blocks, rows, capacity) if keeps else None
        self._hidden_slots: list[Tensor | None] = [None] * num_blocks  # [rows, slots], `mask`
        self.revision = 0
        self.written = np.zeros(rows, np.int64)
        self._counted = -1, 0
        """A revision, and bytes of a slot then."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockKVCache":
        """Buffers of its own; the model that projects is the same one."""
        memo[id(self)] = twin = copy.copy(self)
        for name, value in vars(self).items():
            setattr(twin, name, value if name == "_project" else copy.deepcopy(value, memo))
        return twin

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for as many rows and slots, or leave all as it was where memory is short."""
        if rows > self.rows or slots > self.capacity:
            capacity = max(slots, 2 * self.capacity) if slots > self.capacity else self.capacity
            self._resize(max(rows, self.rows), capacity)

    def will_write(self, rows: Sequence[int], stops: Sequence[int]) -> None:
        """Make room for slots before these, which a pass is going to write.

        Raises:
            MemoryError: The host has less memory than that takes; all stays as it was.
        """
        at, most = list(rows), max(stops)
        written = np.maximum(self.written[at], stops)
        slots = int((written - self.written[at]).sum())
        if most > self.capacity:
            slots += int(self.written.sum())  # what is there is moved
        needed = slots * self._slot_bytes()
        if needed >= _WORTH_ASKING and needed > (free := free_bytes()):
            raise MemoryError(f"the cache needs {needed:,} bytes, and the host has {free:,.0f}")
        self.reserve(0, most)
        self.written[at] = written

    def _slot_bytes(self) -> int:
        """Bytes of the host's memory that a slot takes in all blocks of a row, made so far.

        Every pass asks, so they are counted anew where buffers are others alone.
        """
        revision, size = self._counted
        if revision != self.revision:
            size = sum(
                buffer.shape[1] * buffer.shape[3] * buffer.itemsize
                for buffer in (*self._keys, *self._values)
                if buffer is not None and buffer.device.type == "cpu"
            )
            self._counted = self.revision, size
        return size

    def round_up(self) -> None:
        """Make room for the slots of the next rung: sizes that are made for must be few."""
        if self.capacity != rung(self.capacity):
            self._resize(self.rows, rung(self.capacity))

    def _resize(self, rows: int, capacity: int) -> None:
        keys, values = (
            [None if old is None else _grown(old, rows, capacity, self.written) for old in buffers]
            for buffers in (self._keys, self._values)
        )
        if self.skipped is not None:
            self.skipped.fit(rows, capacity)
        self.written = _padded(self.written, rows)
        # Last: a call that is cut short is made again.
        self._keys, self._values = keys, values
        self.capacity, self.rows = capacity, rows
        self.revision += 1

    def visible(self, block: int, frame: Frame) -> Bool[Tensor, "sequences 1 tokens slots"] | None:
        """Slots that are no hole, under `mask`, or the query's own; None where there is no hole."""
        if self._hidden_slots[block] is None:
            return None
        holes = self._hidden(block)[frame.rows, : frame.stop]
        own = frame.positions[..., None] == torch.arange(frame.stop, device=frame.device)
        return (~holes[:, None] | own)[:, None]

    def context(
        self, block: int, lanes: Lanes
    ) -> tuple[Float[Tensor, "sequences tokens width"], Float[Tensor, "sequences tokens width"]]:
        """Keys and values that this pass put into a block that every lane ran, by sequence."""
        frame = lanes.at(self.devices[block]).whole

        def of_pass(buffer: Tensor | None) -> Tensor:
            assert buffer is not None
            if not frame.is_run:
                rows = lane_index(np.array(lanes.rows), frame.device)[:, None]
                return buffer[rows, :, frame.positions].flatten(2).to(lanes.device)
            first = int(frame.slots[0, 0])
            part = buffer[frame.rows, :, first : frame.stop].transpose(1, 2).flatten(2)
            return part.to(lanes.device)

        return of_pass(self._keys[block]), of_pass(self._values[block])

    def skip(
        self,
        block: int,
        lanes: Lanes,
        chosen: LaneSet,
        hidden: Float[Tensor, "lanes hidden"],
        places: NDArray[np.int32],
    ) -> None:
        """Store the residuals of these lanes, or leave zeros or a hole in their slots."""
        which = np.arange(lanes.num) if chosen is None else chosen
        rows, slots = lanes.row[which], lanes.slot[which]
        if self.skipped is None:
            self._leave(block, rows, slots)
            return
        if self.skipped.room(len(which), hidden):
            places.fill(NOBODY)  # they were renamed
        new = which[places[which] == NOBODY]
        if len(new):
            is_all = len(new) == lanes.num
            residuals = hidden if is_all else hidden[lane_index(new, hidden.device)]
            places[new] = self.skipped.store(residuals)
        self.skipped.arena.waiting[block, rows, slots] = places[which]
        if self.kv_policy == "project":
            self._fill(block, *_stops(rows, slots))

    def _leave(self, block: int, rows: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        device = self.devices[block]
        if self.kv_policy == "mask":
            index = lane_index(rows, device), lane_index(slots, device)
            self._hidden(block)[index] = True
            return
        for buffer in (self._keys[block], self._values[block]):
            if buffer is not None:  # what is made or grown later is made of zeros
                inside = (rows < buffer.shape[0]) & (slots < buffer.shape[2])
                at = lane_index(rows[inside], device)
                buffer[at, :, lane_index(slots[inside], device)] = 0

    def fill(self, block: int, frame: Frame) -> None:
        """Close the holes that the sequences of a frame, which now run `block`, have in it."""
        if self.skipped is not None:
            rows = np.array(frame.row_numbers, np.int64)
            self._fill(block, rows, frame.stops.astype(np.int64))

    def _fill(self, block: int, rows: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Project what waits before these slots; notes are closed when it is written."""
        assert self.skipped is not None
        device = self.devices[block]
        holes = self.skipped.holes(block, rows, stops, device)
        if holes is not None:
            at, slots = lane_index(holes.rows, device), lane_index(holes.slots, device)
            keys, values = self._project(block, holes.hidden, slots)
            key_buffer, value_buffer = self._buffers(block, keys.shape[1], values.shape[2], keys)
            key_buffer[at, :, slots] = keys.to(self.dtype)  # another one under autocast
            value_buffer[at, :, slots] = values.to(self.dtype)
        self.skipped.close(block, rows, stops, holes)

    def _hidden(self, block: int) -> Bool[Tensor, "rows slots"]:
        """The block's holes under `mask`, wide enough for the cache."""
        holes = self._hidden_slots[block]
        if holes is None or holes.shape != (self.rows, self.capacity):
            device = self.devices[block]
            with torch.inference_mode(False):
                grown = torch.zeros(self.rows, self.capacity, dtype=torch.bool, device=device)
            if holes is not None:
                grown[: holes.shape[0], : holes.shape[1]] = holes
            self._hidden_slots[block] = holes = grown
        return holes

    def _buffers(
        self, block: int, heads: int, head_dim: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The block's buffers [rows, heads, slots, head], allocated when first needed."""
        shape = (self.rows, heads, self.capacity, head_dim)
        keys, values = self._keys[block], self._values[block]
        if like.dtype != self.dtype and not torch.is_autocast_enabled(self.device.type):
            raise ModelError(
                f"the model is {like.dtype} now and this session's cache is {self.dtype}: begin a "
                "new session"
            )
        if keys is not None and values is not None:
            return keys, values
        with torch.inference_mode(False):  # a session may go on outside of it
            keys, values = (_zeros(shape, self.dtype, like.device) for _ in "kv")
        new = keys, values
        self._keys[block], self._values[block] = new
        self.revision += 1
        return new

    def allocate(self, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """All blocks' buffers, as large as the cache: for who writes them by address."""
        if self.device.type == "cpu" and all(buffer is None for buffer in self._keys):
            shape = (len(self._keys), 2, self.rows, heads, self.capacity, head_dim)
            with torch.inference_mode(False):
                whole = _zeros(shape, dtype, self.device)
                for block, (keys, values) in enumerate(whole):
                    # No views for autograd, which would refuse to write into them under gradients.
                    self._keys[block], self._values[block] = keys.detach(), values.detach()
            self.revision += 1
        for block in range(len(self._keys)):
            like = torch.empty(0, dtype=dtype, device=self.devices[block])
            self._buffers(block, heads, head_dim, like)
            if self.kv_policy == "mask":
                self._hidden(block)

    def move_to(
        self, keys: list[Tensor], values: list[Tensor], hidden_slots: list[Tensor | None]
    ) -> int:
        """Continue in these buffers, at least as large as the cache; returns the new revision."""
        new: tuple[Sequence[Tensor | None], ...] = (keys, values, hidden_slots)
        for own, others in zip(self.buffers(), new, strict=True):
            for block, other in enumerate(others):
                buffer = own[block]
                if other is None or buffer is other:
                    continue
                other.zero_()
                if buffer is not None:
                    slots = -2 if other.ndim == 4 else -1
                    part = other[: buffer.shape[0]].narrow(slots, 0, buffer.shape[slots])
                    part.copy_(buffer)
                own[block] = other
        self.rows, self.capacity = keys[0].shape[0], keys[0].shape[2]
        self.written = _padded(self.written, self.rows)
        if self.skipped is not None:
            self.skipped.fit(self.rows, self.capacity)
        self.revision += 1
        return self.revision

    def buffers(self) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Keys, values and hidden slots of every block."""
        return self._keys, self._values, self._hidden_slots

    def write(
        self, block: int, frame: Frame, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the frame's keys and values; return all that its sequences may attend to."""
        buffers = self._buffers(block, keys.shape[1], keys.shape[3], keys)
        rows, stop = frame.rows, frame.stop
        if frame.is_run and isinstance(rows, slice):
            start = stop - frame.width
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[rows].narrow(2, start, frame.width).copy_(new)
            return buffers[0][rows].narrow(2, 0, stop), buffers[1][rows].narrow(2, 0, stop)
        with piece(GATHER_SCATTER):
            row, column = frame.real
            at = lane_index(np.array(frame.row_numbers), frame.device)[row]
            slots = frame.positions[row, column]
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[at, :, slots] = new[row, :, column].to(self.dtype)
            return buffers[0].narrow(2, 0, stop)[rows], buffers[1].narrow(2, 0, stop)[rows]

    def select_rows(self, rows: NDArray[np.int64]) -> None:
        """Keep the rows named, in that order; a row may be named twice (beam search)."""
        index = {device: lane_index(rows, device) for device in set(self.devices)}
        chosen = [
            [None if buffer is None else buffer[index[buffer.device]] for buffer in buffers]
            for buffers in self.buffers()
        ]
        skipped = None if self.skipped is None else self.skipped.select_rows(rows)
        self._keys, self._values, self._hidden_slots = chosen
        self.skipped, self.rows, self.written = skipped, len(rows), self.written[rows]
        self.revision += 1

    def copy(self, source: int, row: int, length: int) -> None:
        """Give a row what another one has before slot `length`; what follows is scratch."""
        self.written[row] = max(self.written[row], length)
        for block, keys in enumerate(self._keys):
            if keys is None:
                continue  # what is made later is made of zeros
            for buffer in self._buffers(block, keys.shape[1], keys.shape[3], keys):
                buffer[row, :, :length] = buffer[source, :, :length]
        for block, known in enumerate(self._hidden_slots):
            if known is not None:
                holes = self._hidden(block)
                holes[row, :length] = holes[source, :length]
        if self.skipped is not None:
            self.skipped.copy(source, row, length)

    def cut(self, row: int, length: int) -> None:
        """Forget a row's slots from `length` on."""
        for holes in self._hidden_slots:
            if holes is not None and row < len(holes):
                holes[row, length:] = False
        if self.skipped is not None:
            self.skipped.cut(row, length, int(self.written[row]))

    @torch.inference_mode()
    def clear(self, row: int, start: int, stop: int) -> None:
        """Zero some slots of a row: of NaN, a weight of zero for what nobody sees makes NaN."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None and row < len(buffer):
                buffer[row, :, start:stop] = 0

    def free(self, row: int, length: int) -> None:
        """Zero a row's slots before `length`; of a long one, the host gets the memory back."""
        whole = [b[row] for b in (*self._keys, *self._values) if b is not None and row < len(b)]
        is_long = any(part[:, :length].nbytes >= _WORTH_GIVING_BACK for part in whole)
        if self.device.type != "cpu" or not is_long:
            self.clear(row, 0, length)
            return
        with torch.inference_mode():
            for part in whole:
                zero(part)
        self.written[row] = 0

    def num_bytes(self) -> int:
        """Bytes of the slots that were written, and of the residuals of skipped tokens.

        On a device that is not the host all slots count, as all are there.
        """
        residuals = 0 if self.skipped is None else self.skipped.num_bytes()
        buffers = [b for b in (*self._keys, *self._values) if b is not None]
        elsewhere = sum(b.nbytes for b in buffers if b.device.type != "cpu")
        return residuals + elsewhere + int(self.written.sum()) * self._slot_bytes()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the host they take memory when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return zeroed_memory(num_bytes, is_sparse=True).view(dtype).view(shape)


@torch.inference_mode(False)
@torch.no_grad()
def _grown(old: Tensor, rows: int, slots: int, written: NDArray[np.int64]) -> Tensor:
    """A larger buffer [rows, heads, slots, head] that has what was written of the old one."""
    new = _zeros((rows, old.shape[1], slots, old.shape[3]), old.dtype, old.device).detach()
    for row, stop in enumerate(written[: len(old)].tolist()):
        new[row, :, :stop] = old[row, :, :stop]
    return new


def _padded(written: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Slots written in at least as many rows: none in new ones."""
    return np.pad(written, (0, max(0, rows - len(written))))


def _stops(
    rows: NDArray[np.int32], slots: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each row once, and the slot after its last one; rows come in stretches."""
    last = np.flatnonzero(np.append(rows[1:] != rows[:-1], True))
    return rows[last].astype(np.int64), slots[last].astype(np.int64) + 1
