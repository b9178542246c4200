"""Who says how many blocks the new tokens of a sequence may run, asked at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, runtime_checkable

from buddy.budget.blocks import Budget
from buddy.budget.thinking import ThinkingMarks
from buddy.errors import BudgetError


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a budget source is told of its sequence."""

    is_prompt: bool
    """Whether the new tokens are of the prompt."""
    new_tokens: int
    """How many there are."""
    tokens: int = 0
    """Tokens that were fed before."""
    executed: int = 0
    """Blocks that these ran, all together."""
    num_blocks: int
    """Blocks of the model."""
    answer_tokens: int = 0
    """Tokens fed before that come after the prompt."""
    answer_executed: int = 0
    """Blocks that these ran, all together."""
    token_ids: tuple[int, ...] = ()
    """The new tokens, for a source with `reads_tokens`; none else."""
    note: Any = None
    """What a source with a method `note` has noted of the tokens that were fed before."""


@runtime_checkable
class BudgetSource(Protocol):
    """Names the blocks that each new token of a sequence may run, first and last included.

    A source keeps no state: what ran is in the progress, so that a step that fails, or is taken
    back, is forgotten whole. One that has an attribute `reads_tokens`, and it is true, is told the
    ids of the new tokens. What one with a method `note` returns for a progress is told to it as
    `progress.note` at the next step; it must be a value that never changes.
    """

    def ask(self, progress: Progress) -> int | Sequence[int]:
        """One number for all new tokens, or one for each."""
        ...


@dataclass(frozen=True, slots=True)
class ConstantBudget:
    """The same number of blocks for every token."""

    each: int

    def ask(self, progress: Progress) -> int:
        """That number."""
        return self.each


@dataclass(frozen=True, slots=True)
class PhasedBudget:
    """One number of blocks for the tokens of the prompt, another source for the answer's.

    Prefill is bound by arithmetic and happens once; decode is bound by reading weights and happens
    for each token. So depth is cheapest in the prompt, where it helps all later tokens.
    """

    prompt: int
    answer: BudgetSource

    @property
    def reads_tokens(self) -> bool:
        """Whether the answer's source does."""
        return reads_tokens(self.answer)

    def ask(self, progress: Progress) -> int | Sequence[int]:
        """The number of the prompt, or what the answer's source says."""
        return self.prompt if progress.is_prompt else self.answer.ask(progress)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Numbers of blocks for the tokens of the prompt, of thinking, and of the answer.

    It notes whether thinking goes on. A prompt may end within it.
    """

    prompt: int
    think: int
    answer: int
    marks: ThinkingMarks

    reads_tokens = True

    def ask(self, progress: Progress) -> int | Sequence[int]:
        """The number of the prompt, or that of each token."""
        if progress.is_prompt:
            return self.prompt
        thought = self.marks.are_thought(progress.token_ids, is_open=bool(progress.note))
        return [self.think if is_thought else self.answer for is_thought in thought]

    def note(self, progress: Progress) -> bool:
        """Whether thinking goes on after the new tokens."""
        return self.marks.is_open(progress.token_ids, before=bool(progress.note))


def note_of(source: BudgetSource, progress: Progress) -> Any:
    """What it notes of the new tokens; what was noted before, where it notes nothing."""
    note = getattr(source, "note", None)
    return progress.note if note is None else note(progress)


def reads_tokens(source: BudgetSource) -> bool:
    """Whether it wants to be told which tokens are fed."""
    return bool(getattr(source, "reads_tokens", False))


def blocks_of_lanes(source: BudgetSource, progress: Progress) -> tuple[int, ...]:
    """Blocks of the new tokens: one number for all of them, or one for each.

    Raises:
        BudgetError: The source names another number of budgets than there are new tokens, or what
            is no number of blocks that the model can run.
    """
    budgets = source.ask(progress)
    if not isinstance(budgets, Sequence):
        return (_checked(budgets, progress.num_blocks),)
    if len(budgets) != progress.new_tokens:
        raise BudgetError(
            f"the budget source names {len(budgets)} budgets for {progress.new_tokens} new tokens: "
            "it must return one number for all, or one for each"
        )
    return tuple(_checked(blocks, progress.num_blocks) for blocks in budgets)


def _checked(blocks: Any, num_blocks: int) -> int:
    try:
        return Budget(index(blocks), num_blocks).blocks
    except TypeError as error:
        raise BudgetError(
            f"a budget source must return whole numbers of blocks, got {blocks!r}"
        ) from error
