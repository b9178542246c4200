"""KV cache of a model whose blocks do not all run: what a skipped block leaves behind.

All blocks share one timeline of slots, a slot for each column of the batch, pads included. A
block that a row skips leaves, at that row and slot: zeros (`zero`), a hole that later queries
cannot see (`mask`), keys and values projected from the residual that passed by (`project`), or
that residual itself, projected in one batch when the block next runs (`lazy`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.depth.plan import ALL_ROWS
from buddy.engine.timeline import Timeline
from buddy.errors import PolicyError

KVPolicy = Literal["zero", "mask", "project", "lazy"]
KV_POLICIES = get_args(KVPolicy)
RowSet = slice | Tensor
"""All rows, or those named; never none."""

Projector = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(block, residuals [N, D], positions [N]) -> keys and values [N, heads, head]."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Residuals that passed a block by: `hidden[i, t]` at row `rows[i]`, slot `start + t`.

    Where all rows skip, neighbouring blocks hold the same tensor: a run of them costs one.
    """

    hidden: Float[Tensor, "batch tokens hidden"]
    rows: Int[Tensor, " batch"]
    start: int

    def part(self, places: list[int]) -> "Hole":
        """The part of the rows that stand at these places."""
        return Hole(self.hidden[places], self.rows[places], self.start)


def check_kv_policy(kv_policy: KVPolicy) -> KVPolicy:
    """Refuse what is no KV policy.

    Raises:
        PolicyError: It is none of the four.
    """
    if kv_policy not in KV_POLICIES:
        raise PolicyError(f"kv_policy must be one of {', '.join(KV_POLICIES)}, got {kv_policy!r}")
    return kv_policy


class BlockKVCache:
    """Keys and values of every block, in buffers that are allocated once.

    Args:
        num_blocks: Blocks of the model.
        timeline: Which slots are real tokens, and their positions.
        kv_policy: What a skipped block leaves behind.
        project: Makes keys and values from residuals; `project` and `lazy` need it.
    """

    def __init__(
        self, num_blocks: int, timeline: Timeline, kv_policy: KVPolicy, project: Projector
    ) -> None:
        self.timeline = timeline
        self.kv_policy = check_kv_policy(kv_policy)
        self._project = project
        self._keys: list[Tensor | None] = [None] * num_blocks
        self._values: list[Tensor | None] = [None] * num_blocks
        # By the rows they belong to: rows that never run a block cost those that do nothing.
        self._holes: list[dict[tuple[int, ...], list[Hole]]] = [{} for _ in range(num_blocks)]
        self._hidden_slots: list[Tensor | None] = [None] * num_blocks  # [B, slots], `mask`

    def view(self, block: int, rows: RowSet) -> "BlockView":
        """What attention writes to and reads from, when `rows` run `block`."""
        return BlockView(self, block, rows)

    def visible(self, block: int, rows: RowSet) -> Bool[Tensor, "batch slots"] | None:
        """Slots that are no hole, under `mask`; None where there is none."""
        if self._hidden_slots[block] is None:
            return None
        return ~self._hidden(block)[rows, : self.timeline.length]

    def new_tokens(
        self, block: int
    ) -> tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens width"]]:
        """Keys and values that this step put into a block that every row ran."""
        start, stop = self.timeline.start, self.timeline.length
        keys, values = self._keys[block], self._values[block]
        assert keys is not None
        assert values is not None
        return (
            keys[:, :, start:stop].transpose(1, 2).flatten(2),
            values[:, :, start:stop].transpose(1, 2).flatten(2),
        )

    def skip(self, block: int, rows: RowSet, hidden: Float[Tensor, "all tokens hidden"]) -> None:
        """Note that `rows` pass `block` by in this step; `hidden` is the whole batch's residual."""
        if self.kv_policy == "zero":
            return  # unwritten slots are zero
        if self.kv_policy == "mask":
            self._hide(block, rows)
            return
        every = self.timeline.every_row
        if isinstance(rows, slice):
            key, hole = self._all, Hole(hidden, every, self.timeline.start)
        else:
            key, hole = tuple(rows.tolist()), Hole(hidden[rows], rows, self.timeline.start)
        self._holes[block].setdefault(key, []).append(hole)
        if self.kv_policy == "project":
            self.fill(block, rows)

    def fill(self, block: int, rows: RowSet) -> None:
        """Close the holes that `rows` have in `block`, in one batched projection."""
        waiting = self._holes[block]
        if not waiting:
            return
        chosen = set(self._all if isinstance(rows, slice) else rows.tolist())
        due: list[Hole] = []
        for key in [key for key in waiting if not chosen.isdisjoint(key)]:
            holes = waiting.pop(key)
            rest = tuple(row for row in key if row not in chosen)
            if not rest:
                due += holes
                continue
            inside = [place for place, row in enumerate(key) if row in chosen]
            outside = [place for place, row in enumerate(key) if row not in chosen]
            due += [hole.part(inside) for hole in holes]
            waiting.setdefault(rest, []).extend(hole.part(outside) for hole in holes)
        if due:
            self._write_projected(block, due)

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.timeline.batch))

    def _write_projected(self, block: int, holes: list[Hole]) -> None:
        hidden = torch.cat([hole.hidden.flatten(0, 1) for hole in holes])  # [N, D]
        row = torch.cat([hole.rows.repeat_interleave(hole.hidden.shape[1]) for hole in holes])
        slot = torch.cat(
            [
                torch.arange(hole.start, hole.start + hole.hidden.shape[1], device=row.device)
                .expand(len(hole.rows), -1)
                .flatten()
                for hole in holes
            ]
        )
        if self.timeline.has_pads:
            real = self.timeline.valid[row, slot]
            hidden, row, slot = hidden[real], row[real], slot[real]
        keys, values = self._project(block, hidden, self.timeline.positions[row, slot])
        key_buffer, value_buffer = self._buffers(block, keys.shape[1], values.shape[2], keys)
        key_buffer[row, :, slot] = keys
        value_buffer[row, :, slot] = values

    def _hide(self, block: int, rows: RowSet) -> None:
        self._hidden(block)[rows, self.timeline.start : self.timeline.length] = True

    def _hidden(self, block: int) -> Bool[Tensor, "batch slots"]:
        """The block's holes under `mask`, wide enough for the timeline."""
        holes = self._hidden_slots[block]
        if holes is None or holes.shape[1] < self.timeline.capacity:
            grown = self.timeline.valid.new_zeros(self.timeline.batch, self.timeline.capacity)
            if holes is not None:
                grown[:, : holes.shape[1]] = holes
            self._hidden_slots[block] = holes = grown
        return holes

    def _buffers(
        self, block: int, heads: int, head_dim: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The block's buffers [batch, heads, capacity, head], allocated or grown when needed."""
        keys, values = self._keys[block], self._values[block]
        if keys is not None and values is not None and keys.shape[2] >= self.timeline.capacity:
            return keys, values
        shape = (self.timeline.batch, heads, self.timeline.capacity, head_dim)
        grown = (like.new_zeros(shape), like.new_zeros(shape))
        if keys is not None and values is not None:
            grown[0][:, :, : keys.shape[2]] = keys
            grown[1][:, :, : values.shape[2]] = values
        self._keys[block], self._values[block] = grown
        return grown

    def write(
        self, block: int, rows: RowSet, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store this step's keys and values; return all that the rows may attend to."""
        key_buffer, value_buffer = self._buffers(block, keys.shape[1], keys.shape[3], keys)
        start, stop = self.timeline.start, self.timeline.length
        if isinstance(rows, slice):
            key_buffer.narrow(2, start, stop - start).copy_(keys)
            value_buffer.narrow(2, start, stop - start).copy_(values)
            return key_buffer.narrow(2, 0, stop), value_buffer.narrow(2, 0, stop)
        key_buffer[rows, :, start:stop] = keys
        value_buffer[rows, :, start:stop] = values
        return key_buffer.narrow(2, 0, stop)[rows], value_buffer.narrow(2, 0, stop)[rows]

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep the rows named, in that order; a row may be named twice (beam search)."""
        for block in range(len(self._keys)):
            self.fill(block, ALL_ROWS)
            for buffers in (self._keys, self._values, self._hidden_slots):
                held = buffers[block]
                buffers[block] = None if held is None else held[rows]

    def num_bytes(self) -> int:
        """Bytes of the buffers, and of the residuals that wait in holes."""
        buffers = {id(t): t for t in (*self._keys, *self._values) if t is not None}
        waiting = {
            hole.hidden.untyped_storage().data_ptr(): hole.hidden
            for by_rows in self._holes
            for holes in by_rows.values()
            for hole in holes
        }
        return sum(t.nbytes for t in (*buffers.values(), *waiting.values()))


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block's cache for some rows, under the name by which attention modules call it."""

    cache: BlockKVCache
    block: int
    rows: RowSet

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [batch, heads, tokens, head]; return all to attend to."""
        return self.cache.write(self.block, self.rows, keys, values)


class PassingKV:
    """Keeps nothing but the last keys and values of each block: one pass without a cache."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def view(self, block: int, rows: RowSet) -> "PassingKV":
        """Itself: rows do not matter where nothing is stored."""
        return self

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values back, all that there is to attend to."""
        self._seen[layer_idx] = (keys, values)
        return keys, values

    def visible(self, block: int, rows: RowSet) -> None:
        """Nothing hides."""

    def new_tokens(
        self, block: int
    ) -> tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens width"]]:
        """Keys and values of a block that every row ran."""
        if block not in self._seen:
            raise PolicyError(
                "the router cannot read the context layer's keys and values: transformers hides "
                "them under gradient checkpointing; turn that off"
            )
        keys, values = self._seen[block]
        return keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)

    def skip(self, block: int, rows: RowSet, hidden: Tensor) -> None:
        """Nothing is left behind."""

    def fill(self, block: int, rows: RowSet) -> None:
        """Nothing to fill."""
