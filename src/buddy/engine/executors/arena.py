"""Arenas: the memory at fixed addresses in which captured decode steps work.

It is the cache of the session that has it: the first session's own buffers, which are lent to
others when it is gone. Steps are captured for some lengths of the cache each, so that attention
reads no more than twice the slots that the longest sequence has.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.recurring import BlockOrder, RecurringPlans, Replay
from buddy.engine.state.cache import rung
from buddy.engine.state.session import Session
from buddy.engine.state.view import BlockView

Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function does, in fixed memory; calling the result does it again."""

_LEAST_SLOTS: Final = 64
"""The shortest length that steps are captured for: shorter ones would save nothing."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A decode step over the first slots of an arena.

    Attributes:
        begin: Embeds the tokens, and makes angles and masks.
        blocks: One for each block.
        every_slot: The slots.
        masks: By window, who sees which of them; as the slots, where graphs know it to be.
    """

    begin: Replay
    blocks: list[Replay]
    every_slot: Tensor
    masks: dict[int | None, Tensor]


class Arena:
    """Buffers of one session at a time, and the graphs that work in them.

    Args:
        backbone: Whose blocks are captured.
        capture: Makes a replay of a piece of work.
        session: Its cache becomes the arena's, at the next length of the ladder.
    """

    @torch.inference_mode(False)  # it outlives whoever decodes first
    @torch.no_grad()
    def __init__(self, backbone: Backbone, capture: Capture, session: Session) -> None:
        self._backbone, self._capture = backbone, capture
        kv, head_dim = session.kv, backbone.head_dim
        kv.round_up()
        kv.allocate(backbone.kv_width // head_dim, head_dim, backbone.dtype)
        self._key = key_of(session)
        self._borrower: weakref.ref[Session] | None = None
        self._revision = -1
        keys, values, hidden_slots = kv.buffers()
        self.keys = [_lasting(buffer) for buffer in keys if buffer is not None]
        self.values = [_lasting(buffer) for buffer in values if buffer is not None]
        self.hidden_slots = [None if hides is None else _lasting(hides) for hides in hidden_slots]
        self.tokens = torch.zeros(kv.rows, 1, dtype=torch.long, device=kv.device)
        self.slot = torch.zeros_like(self.tokens)
        self.block_mask = torch.zeros(
            kv.rows, backbone.num_blocks, dtype=torch.bool, device=kv.device
        )
        empty = torch.zeros(0, dtype=backbone.dtype, device=kv.device)
        self.hidden = empty.new_zeros(kv.rows, 1, backbone.config.hidden_size)
        self.entering = self.hidden.new_zeros(backbone.num_blocks, *self.hidden.shape)
        self.logits = torch.zeros_like(backbone.logits(self.hidden))
        self._rotary = tuple(map(torch.zeros_like, backbone.rotary(self.hidden, self.slot)))
        self.head = capture(self._head)
        self._captured: dict[int, Captured] = {}
        self._plans = RecurringPlans()

    def holds(self, session: Session) -> bool:
        """Whether the session's buffers are this arena's."""
        return self.borrower is session and self._revision == session.kv.revision

    @property
    def borrower(self) -> Session | None:
        """Who has it; None where its last borrower is gone."""
        return None if self._borrower is None else self._borrower()

    def fits(self, session: Session) -> bool:
        """Whether nobody else has it, and the session's buffers are of its size."""
        return self.borrower in (None, session) and self._key == key_of(session)

    def lend(self, session: Session) -> None:
        """Move the session's cache here, where it is not here already."""
        self._revision = session.kv.move_to(self.keys, self.values, self.hidden_slots)
        self._borrower = weakref.ref(session)

    @property
    def num_bytes(self) -> int:
        """Bytes of its buffers."""
        buffers = (*self.keys, *self.values, *self.hidden_slots, self.hidden, self.logits)
        masks = (mask for captured in self._captured.values() for mask in captured.masks.values())
        every = (*buffers, *masks, self.entering)
        return sum(buffer.nbytes for buffer in every if buffer is not None)

    def captured(self, stop: int) -> Captured:
        """The step over all slots before one, and over no more than twice as many, or 64."""
        slots = min(max(_LEAST_SLOTS, 1 << (stop - 1).bit_length()), self.keys[0].shape[2])
        if slots not in self._captured:
            self._captured[slots] = self._capture_all(slots)
        return self._captured[slots]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _capture_all(self, slots: int) -> Captured:
        every_slot = torch.arange(slots, device=self.slot.device)
        nothing = torch.zeros(
            len(self.slot), 1, 1, slots, dtype=torch.bool, device=self.slot.device
        )
        masks = {window: nothing.clone() for window in set(self._backbone.windows)}
        self.block_mask.zero_()  # nobody runs what is run to be captured: the cache stays as it is
        begin = self._capture(partial(self._begin, every_slot, masks))
        blocks = [
            self._capture(partial(self._run, block, every_slot, masks[window]))
            for block, window in enumerate(self._backbone.windows)
        ]
        return Captured(begin, blocks, every_slot, masks)

    def recurring(self, captured: Captured, order: BlockOrder) -> Replay | None:
        """All that a step does with some blocks, where it has come often; they run as one."""
        if len(order.runs) < 2:
            return None
        key = len(captured.every_slot), order.key
        return self._plans.find(key, partial(self._capture_order, captured, order))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _capture_order(self, captured: Captured, order: BlockOrder) -> Replay:
        self.block_mask.zero_()  # as above
        return self._capture(partial(self._run_order, captured, order))

    def _run_order(self, captured: Captured, order: BlockOrder) -> None:
        """The blocks of a plan; residuals that enter those that are skipped are kept."""
        runs, kept = set(order.runs), -1
        for block in order.blocks:
            number = order.enters.get(block, kept)
            if number > kept:
                self.entering[number].copy_(self.hidden)
                kept = number
            if block in runs:
                window = self._backbone.windows[block]
                self._run(block, captured.every_slot, captured.masks[window])

    def _begin(self, every_slot: Tensor, masks: dict[int | None, Tensor]) -> None:
        """Embedding, rotary and masks."""
        self.hidden.copy_(self._backbone.embed(self.tokens))
        angles = self._backbone.rotary(self.hidden, self.slot)
        for buffer, new in zip(self._rotary, angles, strict=True):
            buffer.copy_(new)
        for window, mask in masks.items():
            distance = self.slot - every_slot
            seen = distance >= 0
            if window is not None:
                seen = seen & (distance < window)
            mask.copy_(seen[:, None, None])

    def _run(self, block: int, every_slot: Tensor, mask: Tensor) -> None:
        """One block for all rows; those that skip it keep their residual and their cache."""
        hides, slots = self.hidden_slots[block], len(every_slot)
        if hides is not None:
            mask = mask & ~hides[:, None, None, :slots]
            # A row that skips sees nothing else, perhaps: its own slot keeps the sum finite.
            mask = mask | (every_slot == self.slot)[:, None, None]
        kv = BlockView(partial(self._write, block, slots))
        cos, sin = self._rotary
        out = self._backbone.run_block(block, self.hidden, mask, self.slot, (cos, sin), kv)
        self.hidden.copy_(torch.where(self.block_mask[:, block, None, None], out, self.hidden))

    def _head(self) -> None:
        self.logits.copy_(self._backbone.logits(self.hidden))

    def _write(self, block: int, slots: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This step's keys and values into the slot of the rows that run; the first slots back."""
        runs = self.block_mask[:, block, None, None, None]
        slot = self.slot[:, None, :, None].expand_as(keys)
        for buffer, new in ((self.keys[block], keys), (self.values[block], values)):
            buffer.scatter_(2, slot, torch.where(runs, new, buffer.gather(2, slot)))
        return self.keys[block].narrow(2, 0, slots), self.values[block].narrow(2, 0, slots)


def key_of(session: Session) -> tuple[int, int, bool]:
    """What the arena of a session is like: its rows, its slots, and whether slots are hidden."""
    return session.kv.rows, rung(session.kv.capacity), session.kv.kv_policy == "mask"


def _lasting(buffer: Tensor) -> Tensor:
    """A buffer that may be written whatever mode is on: beams chosen in inference mode may not."""
    return buffer.clone() if buffer.is_inference() else buffer
