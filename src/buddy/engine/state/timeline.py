"""The timeline that all blocks share: which slots are real tokens, their positions, who sees whom.

transformers derives one mask and the positions from one layer's cache length; under routing the
blocks' caches differ, so both are kept here.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from buddy.errors import PromptError


class Timeline:
    """Slots of a batch, one for each column fed so far, pads included.

    Attributes:
        batch: Rows.
        start: First slot of the current step.
        length: Slots in use, the current step's included.
        valid: [batch, capacity], True = a real token.
        positions: [batch, capacity], counted over real tokens alone.
        every_row: [batch], the rows' numbers.
        has_pads: Whether any slot in use is a pad.
        step_has_pads: Whether any of the current step is.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str) -> None:
        self.batch = batch
        self.device = torch.device(device)
        self.start = 0
        self.length = 0
        self.has_pads = self.step_has_pads = False
        self.valid = torch.zeros(batch, capacity, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self.every_row = torch.arange(batch, device=device)
        self._count = torch.zeros(batch, dtype=torch.long, device=device)
        self._masks: dict[int | None, Tensor | None] = {}

    @property
    def capacity(self) -> int:
        """Slots that fit before buffers grow."""
        return self.valid.shape[1]

    def extend(self, valid: Bool[Tensor, "batch tokens"]) -> None:
        """Begin a step of `valid.shape[1]` new slots."""
        self.start, self.length = self.length, self.length + valid.shape[1]
        if self.length > self.capacity:
            self._grow(max(self.length, 2 * self.capacity) - self.capacity)
        new = slice(self.start, self.length)
        self._masks = {}
        if valid.shape[1] == 1 and bool(valid.all()):  # a decode step: no more work than need be
            self.valid[:, new] = True
            self.positions[:, new] = self._count[:, None]
            self._count = self._count + 1
            self.step_has_pads = False
            return
        self.step_has_pads = not bool(valid.all())
        self.has_pads = self.has_pads or self.step_has_pads
        self.valid[:, new] = valid
        self.positions[:, new] = (self._count[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        self._count = self._count + valid.sum(1)

    def cut(self, length: int) -> None:
        """Forget slots from `length` on."""
        self._count = self._count - self.valid[:, length : self.length].sum(1)
        self.valid[:, length : self.length] = False
        self.length, self._masks = length, {}
        self.start = min(self.start, length)

    def check_room(self, valid: Bool[Tensor, "batch tokens"], context: int) -> None:
        """Refuse new tokens that the model's context does not hold.

        Raises:
            PromptError: A row would be longer than the context.
        """
        longest = int((self._count + valid.sum(1)).max())
        if longest > context:
            raise PromptError(
                f"a sequence would have {longest} tokens, but the model's context holds {context}"
            )

    def move_to(self, valid: Tensor, positions: Tensor) -> None:
        """Continue in these tensors, of the present shape."""
        self.valid, self.positions = valid.copy_(self.valid), positions.copy_(self.positions)

    def _grow(self, slots: int) -> None:
        self.valid = torch.nn.functional.pad(self.valid, (0, slots))
        self.positions = torch.nn.functional.pad(self.positions, (0, slots))

    @property
    def new_positions(self) -> Int[Tensor, "batch tokens"]:
        """Positions of the current step's tokens."""
        return self.positions[:, self.start : self.length]

    def mask(self, window: int | None) -> Bool[Tensor, "batch 1 tokens slots"] | None:
        """Who sees whom in this step, for a block with this sliding window.

        None where plain causality over the step says it all. A pad sees itself, so that no
        row of the softmax is empty.
        """
        if window not in self._masks:
            self._masks[window] = None if self._is_plain(window) else self.full_mask(window)
        return self._masks[window]

    def _is_plain(self, window: int | None) -> bool:
        in_window = window is None or self.length <= window
        return (
            in_window and not self.has_pads and (self.start == 0 or self.length == self.start + 1)
        )

    def full_mask(self, window: int | None) -> Bool[Tensor, "batch 1 tokens slots"]:
        """The mask of this step, spelled out."""
        slot = torch.arange(self.length, device=self.device)
        query = slot[self.start :, None]  # [T, 1]
        position = self.positions[:, : self.length]
        seen = self.valid[:, None, : self.length] & (slot <= query)  # [B, T, S]
        if window is not None:
            distance = self.new_positions[:, :, None] - position[:, None]
            seen = seen & (distance < window)
        return (seen | (slot == query))[:, None]

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep the rows named, in that order."""
        self.batch, self.every_row = len(rows), torch.arange(len(rows), device=self.device)
        self.valid, self.positions = self.valid[rows], self.positions[rows]
        self._count, self._masks = self._count[rows], {}
