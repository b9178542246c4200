"""Session: the sequences that run side by side, and their cache. They join and leave at any step.

What is committed is one value that is replaced in one assignment: a step that fails or is
interrupted leaves the sequences as they were, and in the cache nothing but scratch.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.source import BudgetSource, ConstantBudget
from buddy.engine.state.cache import BlockKVCache, KVPolicy, rung
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.sequence import Reroute, SequenceState
from buddy.errors import PromptError


@dataclass(frozen=True, slots=True)
class SessionState:
    """What a session has committed.

    Attributes:
        sequences: By the id that `join` gave.
        columns: Columns of a padded batch that were fed, pads included.
    """

    sequences: Mapping[int, SequenceState] = field(default_factory=dict)
    columns: int = 0


class Session:
    """Sequences, their route states and their cache.

    It travels as `cache`, and answers to the few names that `generate` calls.

    Args:
        backbone: The model that will run.
        rows: Sequences that there is room for at first.
        capacity: Slots of each at first; buffers grow when they are full.
        kv_policy: What a skipped block leaves in its cache.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)  # no block keeps a state in the place of keys and values
    _is_user_defined = False  # whether a caller passed it to `generate`, as transformers notes it

    def __init__(self, backbone: Backbone, rows: int, capacity: int, kv_policy: KVPolicy) -> None:
        self.kv = BlockKVCache(
            backbone.num_blocks,
            rows,
            capacity,
            kv_policy,
            backbone.project,
            backbone.devices,
            backbone.dtype,
        )
        self._embedding = weakref.ref(backbone.embedding)
        self.batch = rows
        """Rows that a batch fed through `forward` has."""
        self._full = ConstantBudget(backbone.num_blocks)
        self._state = SessionState()
        self._next = 0
        self._uncommitted: Mapping[int, int] = {}
        """Rows that a pass may have written to, and the slot before which it did."""

    def is_of(self, backbone: Backbone) -> bool:
        """Whether it was made for this model, by whichever of its wrappers."""
        return self._embedding() is backbone.embedding

    @property
    def state(self) -> SessionState:
        """What is committed."""
        return self._state

    @property
    def sequences(self) -> Mapping[int, SequenceState]:
        """Those that are here, by id."""
        return self._state.sequences

    @property
    def steps(self) -> int:
        """Steps of the sequence that has taken part in most."""
        return max((sequence.steps for sequence in self.sequences.values()), default=0)

    def join(self, source: BudgetSource | None = None, *, reroute: Reroute = "step") -> int:
        """Take in a sequence; its first step feeds its prompt.

        Args:
            source: Says how many blocks its tokens may run; None = full depth.
            reroute: When its blocks are chosen again.

        Returns:
            Its id, never given twice.
        """
        self.discard_uncommitted()
        taken = {sequence.row for sequence in self.sequences.values()}
        row = next(at for at in range(len(taken) + 1) if at not in taken)
        if row >= self.kv.rows:
            self.kv.reserve(rung(row + 1), 0)  # one by one all would be copied each time
        self.kv.cut(row, 0)
        sequence_id, self._next = self._next, self._next + 1
        new = SequenceState(row=row, source=source or self._full, reroute=reroute)
        self._state = replace(self._state, sequences={**self.sequences, sequence_id: new})
        return sequence_id

    def branch(
        self, sequence_id: int, length: int, source: BudgetSource, *, reroute: Reroute = "step"
    ) -> int:
        """Take in a sequence that begins with the first tokens of another one.

        They are not computed again: what the cache has of them is copied. They count as tokens of
        its prompt; its blocks, as counted, begin at none, and its source has noted nothing yet.

        Args:
            sequence_id: Of the other sequence, which goes on as it is.
            length: Tokens that the two share, at most those that were fed.
            source: Says how many blocks its other tokens may run.
            reroute: When its blocks are chosen again.

        Returns:
            Its id.

        Raises:
            PromptError: There is no such sequence, or it is shorter.
        """
        (other,) = self.find((sequence_id,))
        if not 0 <= length <= other.length:
            raise PromptError(
                f"a sequence of {other.length} tokens cannot give its first {length}: expected 0 "
                f"to {other.length}"
            )
        new_id = self.join(source, reroute=reroute)
        new = replace(self.sequences[new_id], length=length, prompt_length=length)
        self._uncommitted = {new.row: length}
        try:
            self.kv.copy(other.row, new.row, length)
        except BaseException:
            self.leave(new_id)
            raise
        self.commit(replace(self._state, sequences={**self.sequences, new_id: new}))
        return new_id

    def leave(self, *sequence_ids: int) -> None:
        """Let sequences go; their rows are free at once.

        Raises:
            PromptError: There is no such sequence.
        """
        gone = self.find(sequence_ids)
        rest = {at: self.sequences[at] for at in self.sequences if at not in sequence_ids}
        self._state = replace(self._state, sequences=rest)
        if self.kv.skipped is not None:
            taken = {sequence.row for sequence in rest.values()}
            for row in set(range(self.kv.rows)) - taken:
                self.kv.cut(row, 0)
            self.kv.skipped.trim(sum(sequence.length for sequence in gone))
        for sequence in gone:
            self.kv.free(sequence.row, sequence.length)

    def find(self, sequence_ids: Sequence[int]) -> list[SequenceState]:
        """The sequences of these ids.

        Raises:
            PromptError: There is no such sequence, or one is named twice.
        """
        known = set(sequence_ids) & self.sequences.keys()
        if len(known) < len(sequence_ids):
            raise PromptError(
                f"the session holds the sequences {sorted(self.sequences)}, each of which may be "
                f"fed once a step, got {list(sequence_ids)}"
            )
        return [self.sequences[sequence_id] for sequence_id in sequence_ids]

    def begin(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> Lanes:
        """Lanes for a pass over new tokens of these sequences, with room for them in the cache."""
        self.discard_uncommitted()
        rows = tuple(sequence.row for sequence in sequences)
        starts = tuple(sequence.length for sequence in sequences)
        lanes = Lanes(rows, starts, tuple(counts), self.kv.device)
        self._uncommitted = dict(zip(rows, lanes.stops, strict=True))
        self.kv.will_write(rows, lanes.stops)
        return lanes

    def commit(self, state: SessionState) -> None:
        """Make this what the session holds."""
        self._state = state
        self._uncommitted = {}

    def rewind(self, state: SessionState) -> None:
        """Go back to what was committed earlier, in this session."""
        self._uncommitted = {sequence.row: 0 for sequence in state.sequences.values()}
        self._state = state
        self.discard_uncommitted()

    def discard_uncommitted(self, *, has_failed: bool = False) -> None:
        """Clear what a pass that was cut short has left behind; it may be cut short itself.

        Args:
            has_failed: Clear keys and values too, which else are scratch that a later stretch of
                blocks may go on from.
        """
        if not self._uncommitted:
            return
        length = {sequence.row: sequence.length for sequence in self.sequences.values()}
        for row, stop in self._uncommitted.items():
            first = length.get(row, 0)
            self.kv.cut(row, first)
            if has_failed and first < stop:
                self.kv.clear(row, first, stop)
        self._uncommitted = {}

    def get_seq_length(self, *args: Any) -> int:
        """Columns that were fed, pads included."""
        return self._state.columns

    def reorder_cache(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep the sequences at these places of the batch, in that order (beam search)."""
        self.discard_uncommitted()
        chosen = rows.tolist()
        old = list(self.sequences.values())
        self.kv.select_rows(np.array([old[at].row for at in chosen], np.int64))
        self.batch = len(chosen)
        new = {self._next + row: replace(old[at], row=row) for row, at in enumerate(chosen)}
        self._next += len(chosen)
        self._state = replace(self._state, sequences=new)
