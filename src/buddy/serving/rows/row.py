"""One request on its way: what was fed, how deep, what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from buddy.budget.resolved import Phase
from buddy.budget.source import BudgetSource
from buddy.engine.planned_prompt import PlannedPrompt
from buddy.generation.text_drafter import TextDrafter
from buddy.serving.control.protocol import RowView
from buddy.serving.request import Deliver, GenerationRequest, PhaseUsage, Usage
from buddy.serving.rows.grammar import GrammarState
from buddy.serving.rows.pool import Fed, common
from buddy.serving.rows.sampler import Picker
from buddy.serving.rows.scoring import PromptScorer
from buddy.serving.rows.text import StopStrings, TokenText


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request that waits for a row."""

    number: int
    request: GenerationRequest
    deliver: Deliver
    grammar: GrammarState | None
    at_s: float
    """When it came."""


@dataclass(slots=True, eq=False)
class Row:
    """A request that has a row, or is about to get one."""

    submitted: Submitted
    picker: Picker
    text: TokenText
    stop: StopStrings
    wanted: int
    """Blocks of a token of the answer without load."""
    prompt: NDArray[np.int64]
    scorer: PromptScorer | None = None
    """Scores the prompt, until it has told what it found."""
    budget_source: BudgetSource | None = None
    """Says the depth of each token of the answer, where their mean is named and not their depth."""
    drafter: TextDrafter | None = None
    """Drafts its answer; None = it is not drafted for."""
    depth: int = field(init=False)
    """Blocks of the next token."""
    tokens_at_depth: int = 0
    """Tokens of the answer since that changed."""
    sequence: int | None = None
    """Number in the session; None before the first token is fed."""
    planned: PlannedPrompt | None = None
    """What is known of the whole prompt's plan before it is fed."""
    num_fed: int = 0
    """Tokens that were fed, or taken over from others."""
    num_cached: int = 0
    """Those of them that were taken over."""
    last: int = -1
    """The token that is to be fed next, once the prompt has been."""
    answer: list[int] = field(default_factory=list)
    ran: list[NDArray[np.bool_]] = field(default_factory=list)
    """What each token of the answer that was fed ran."""
    is_thinking: bool = False
    """Whether the next token is one of thinking, where that has a budget of its own."""
    spent: dict[Phase, PhaseUsage] = field(default_factory=dict)
    """What tokens of each phase that were fed took."""
    made_by: int = 0
    """Blocks that made the answer's logits, all together."""
    distinct_plans: set[bytes] = field(default_factory=set)
    most_blocks: int = 0
    """Blocks of the token of the answer that was allowed most."""
    least_blocks: int | None = None
    """Blocks of the token of the answer that ran fewest; None before the first."""
    unloaded: int | None = None
    """What it would have without load, where the control has said so."""
    last_s: float = 0.0
    """When its last token came."""
    is_gone: bool = False

    def __post_init__(self) -> None:
        budget = self.request.budget
        self.depth = budget.prompt if budget.is_contract else self.wanted
        if budget.marks is not None:
            self.is_thinking = budget.marks.is_open(self.request.prompt)

    @property
    def number(self) -> int:
        """The number that the client knows."""
        return self.submitted.number

    @property
    def request(self) -> GenerationRequest:
        """What was asked."""
        return self.submitted.request

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that are to be fed."""
        return max(0, len(self.prompt) - self.num_fed)

    @property
    def is_seeded(self) -> bool:
        """Whether its text may depend on the request alone."""
        return self.request.sampling.seed is not None

    @property
    def is_elastic(self) -> bool:
        """Whether its depth may be changed."""
        return self.request.budget.is_elastic(is_seeded=self.is_seeded)

    def view(self) -> RowView:
        """What control sees."""
        return RowView(
            number=self.number,
            budget=self.request.budget,
            wanted=self.wanted,
            depth=self.depth,
            steps=self.tokens_at_depth,
            context=self.num_fed,
            is_elastic=self.is_elastic,
            prompt_left=self.prompt_left,
        )

    def set_depth(self, blocks: int) -> None:
        """Go on at another depth, within what the budget allows."""
        assert not self.request.budget.is_contract
        blocks = self.request.budget.clamp(blocks)
        if blocks != self.depth:
            self.depth, self.tokens_at_depth = blocks, 0

    @property
    def executed(self) -> int:
        """Blocks that ran for tokens that were fed, all together."""
        return sum(spent.blocks_executed for spent in self.spent.values())

    def note_fed(self, count: int, blocks: int) -> None:
        """The next tokens, of the prompt or one of the answer, were fed, and ran these blocks."""
        budget = self.request.budget
        phase = budget.phase(is_prompt=self.prompt_left > 0, is_thought=self.is_thinking)
        spent = self.spent.get(phase, PhaseUsage())
        self.spent[phase] = PhaseUsage(
            tokens=spent.tokens + count, blocks_executed=spent.blocks_executed + blocks
        )
        self.num_fed += count

    def note_token(self, token: int, runs: NDArray[np.bool_], now_s: float) -> None:
        """A token has come, from logits that these blocks made."""
        budget = self.request.budget
        depth = int(runs.sum())
        self.made_by += depth
        self.distinct_plans.add(runs.tobytes())
        if (grammar := self.picker.grammar) is not None:  # in whose text a mark is none
            self.is_thinking = grammar.is_thinking
        elif budget.marks is not None:
            (self.is_thinking,) = budget.marks.are_thought((token,), is_open=self.is_thinking)
        if budget.is_contract:
            self.depth = self.wanted
            if self.is_thinking and budget.think is not None:
                self.depth = budget.think
        is_exact = budget.is_contract and self.budget_source is None
        self.most_blocks = max(self.most_blocks, self.depth if is_exact else depth)
        self.least_blocks = depth if self.least_blocks is None else min(self.least_blocks, depth)
        self.answer.append(token)
        if self.drafter is not None:
            self.drafter.add(token)
        self.last, self.last_s = token, now_s
        self.tokens_at_depth += 1

    def note_prompt_alone(self, runs: NDArray[np.bool_]) -> None:
        """No answer follows the prompt, whose last token ran these blocks."""
        self.distinct_plans.add(runs.tobytes())
        self.most_blocks = self.least_blocks = int(runs.sum())

    def kept(self) -> Fed | None:
        """What it was fed, for others to begin with; None where its plan was not known ahead."""
        if self.planned is None:
            return None
        known = min(self.num_fed, len(self.prompt))
        tokens = np.concatenate([self.prompt[:known], np.array(self.answer, np.int64)])[
            : self.num_fed
        ]
        runs = np.broadcast_to(self.planned.block_mask, (known, len(self.planned.block_mask)))
        if self.ran:
            runs = np.concatenate([runs, np.stack(self.ran)])
        return Fed(tokens, runs, self.request.owner)

    def usage(self) -> Usage:
        """What it took."""
        tokens = len(self.answer)
        budget = self.request.budget
        free = self.wanted if self.unloaded is None else self.unloaded
        is_lowered = not budget.is_contract and (self.least_blocks or free) < free
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.num_cached,
            completion_tokens=tokens,
            blocks_executed=self.executed,
            budget_blocks=self.most_blocks,
            blocks_per_token=self.made_by / tokens if tokens else 0.0,
            distinct_plans=len(self.distinct_plans),
            source=budget.kind,
            lowered_from=free if is_lowered else None,
            phases=dict(self.spent) if budget.has_phases else None,
        )


def best_beginning(row: Row, ahead: Sequence[Row], least: int) -> tuple[tuple[int, int], bool]:
    """What running rows have of a row's prompt.

    Args:
        row: Nothing of it has been fed.
        ahead: Rows that are fed before it.
        least: Tokens below which nothing is shared.

    Returns:
        The sequence that has most and how many tokens, and whether another will soon have more.
    """
    assert row.planned is not None
    most, best, soon = len(row.prompt) - 1, (-1, 0), 0
    for other in ahead:
        if other.planned is None or other.sequence is None:
            continue
        if other.request.owner != row.request.owner:
            continue
        if not np.array_equal(other.planned.block_mask, row.planned.block_mask):
            continue
        count = min(most, common(other.prompt, row.prompt))
        if min(count, other.num_fed) > best[1]:
            best = (other.sequence, min(count, other.num_fed))
        if other.prompt_left:
            soon = max(soon, count)
    return best, soon >= max(least, best[1] + 1)
