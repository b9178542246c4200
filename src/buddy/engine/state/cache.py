"""KV cache of a model whose blocks do not all run: what a skipped block leaves behind.

All blocks share one timeline of slots, a slot for each column of the batch, pads included. A
block that a row skips leaves, at that row and slot: zeros (`zero`), a hole that later queries
cannot see (`mask`), keys and values projected from the residual that passed by (`project`), or
that residual itself, projected in one batch when the block next runs (`lazy`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.engine.state.skipped import PassedResiduals
from buddy.engine.state.timeline import Timeline
from buddy.errors import PolicyError

KVPolicy = Literal["zero", "mask", "project", "lazy"]
KV_POLICIES = get_args(KVPolicy)
RowSet = slice | Tensor
"""All rows, or those named; never none."""

Projector = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(block, residuals [N, D], positions [N]) -> keys and values [N, heads, head]."""


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
        keeps = kv_policy in ("project", "lazy")
        self.passed = PassedResiduals(num_blocks, timeline) if keeps else None
        self._hidden_slots: list[Tensor | None] = [None] * num_blocks  # [B, slots], `mask`
        self.revision = 0
        """Changes when a buffer of keys or values is another one."""

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
        assert self.passed is not None
        self.passed.keep(block, self._numbers(rows), hidden)
        if self.kv_policy == "project":
            self._fill(block, rows, self.timeline.length)

    def fill(self, block: int, rows: RowSet) -> None:
        """Close the holes of `rows`, which now run `block`, in one batched projection."""
        self._fill(block, rows, self.timeline.start)

    def _fill(self, block: int, rows: RowSet, stop: int) -> None:
        if self.passed is None:
            return
        due = self.passed.due(block, self._numbers(rows), stop)
        if due is None:
            return
        row, slot, hidden = due
        keys, values = self._project(block, hidden, self.timeline.positions[row, slot])
        key_buffer, value_buffer = self._buffers(block, keys.shape[1], values.shape[2], keys)
        key_buffer[row, :, slot] = keys
        value_buffer[row, :, slot] = values

    def _numbers(self, rows: RowSet) -> Sequence[int]:
        return range(self.timeline.batch) if isinstance(rows, slice) else rows.tolist()

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
        self.revision += 1
        return grown

    def allocate(self, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """All blocks' buffers, wide enough for the timeline: for who writes them by address."""
        like = torch.empty(0, dtype=dtype, device=self.timeline.device)
        for block in range(len(self._keys)):
            self._buffers(block, heads, head_dim, like)

    def move_to(
        self, keys: list[Tensor], values: list[Tensor], hidden_slots: list[Tensor | None]
    ) -> int:
        """Continue in these buffers, as wide as the timeline; returns the new revision."""
        for own, others in (
            (self._keys, keys),
            (self._values, values),
            (self._hidden_slots, hidden_slots),
        ):
            for block, other in enumerate(others):
                held = own[block]
                if other is None or held is other:
                    continue
                other.zero_()
                if held is not None:
                    slots = -2 if other.ndim == 4 else -1
                    other.narrow(slots, 0, held.shape[slots]).copy_(held)
                own[block] = other
        self.revision += 1
        return self.revision

    def buffers(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Keys and values of every block, [batch, heads, capacity, head] each."""
        return self._keys, self._values

    def hidden_slots(self) -> list[Tensor | None] | None:
        """By block the slots [batch, capacity] that are holes under `mask`; None without any."""
        found = [None if t is None else self._hidden(b) for b, t in enumerate(self._hidden_slots)]
        return found if any(t is not None for t in found) else None

    def hide(self, blocks: range, runs: Bool[Tensor, "batch blocks"]) -> None:
        """Under `mask`: the step's slots are holes in the blocks that their rows skip."""
        for block in blocks:
            rows = (~runs[:, block]).nonzero()[:, 0]
            if len(rows):
                self._hide(block, rows)

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
        for buffers in (self._keys, self._values, self._hidden_slots):
            for block, held in enumerate(buffers):
                buffers[block] = None if held is None else held[rows]
        self.revision += 1
        if self.passed is not None:
            self.passed.select_rows(rows)

    def cut(self, length: int) -> None:
        """Forget slots from `length` on."""
        for keys, values in zip(self._keys, self._values, strict=True):
            if keys is not None and values is not None and self.kv_policy == "zero":
                keys[:, :, length:] = 0  # a slot that is skipped next must read as zero
                values[:, :, length:] = 0
        for hidden in self._hidden_slots:
            if hidden is not None:
                hidden[:, length:] = False
        if self.passed is not None:
            self.passed.cut(length)

    def num_bytes(self) -> int:
        """Bytes of the buffers, and of the residuals that passed blocks by."""
        kept = 0 if self.passed is None else self.passed.num_bytes()
        return kept + sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)


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
