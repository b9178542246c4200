"""A budget in blocks of one model: what engine, server and evaluation ask, whatever its form."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from buddy.budget.ledger import DepthPrices, LedgerBudget, check_mean
from buddy.budget.source import BudgetSource, ConstantBudget, PhasedBudget, ThinkingBudget
from buddy.budget.thinking import ThinkingMarks
from buddy.errors import BudgetError


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What can be asked of a model, and of who serves it."""

    num_blocks: int
    """Blocks of the model."""
    least: int
    """Blocks below which no elastic budget goes."""
    has_predictor: bool = False
    """Whether a Budget Predictor can choose."""
    means: tuple[int, int] | None = None
    """The smallest and the largest mean that the model's ledger spends, in blocks."""
    find_marks: Callable[[], ThinkingMarks | None] = lambda: None
    """Finds the marks around what the model thinks aloud; called for a budget of thinking alone."""


Phase = Literal["prompt", "think", "answer"]
"""A part of a request with a budget of its own, as reports name it."""

BudgetKind = Literal["fixed", "mean", "auto", "deadline", "default", "own"]
"""Form that a user wrote; `own` is a source or a function, which Python alone can pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedBudget:
    """Blocks that the tokens of a request may run, and whether load may change that."""

    kind: str
    """What replies and metrics call it: a `BudgetKind`, or what another package's form says."""
    least: int
    """Blocks of a token of the answer, under any load; the same as `most` under a contract."""
    most: int
    """Blocks of a token of the answer, at most; of a mean, what it rounds up to."""
    prefill: int | None = None
    """Blocks of a token of the prompt, where that is another number than the answer's."""
    think: int | None = None
    """Blocks of a token of thinking, where that has a budget of its own."""
    marks: ThinkingMarks | None = None
    """The marks around it."""
    mean: Fraction | None = None
    """Blocks over the tokens of the answer, on average and never more."""
    ms_per_token: float = math.inf
    """Time that a token may take; infinite where nothing is said of it."""
    own: BudgetSource | None = None
    """The source of a form that has one of its own."""

    @property
    def is_auto(self) -> bool:
        """Whether the Budget Predictor chooses, from the prompt."""
        return self.kind == "auto"

    @property
    def is_default(self) -> bool:
        """Whether the request named nothing, so that it is lowered only to keep a target."""
        return self.kind == "default"

    @property
    def has_deadline(self) -> bool:
        """Whether it says how long a token may take."""
        return self.ms_per_token < math.inf

    @property
    def is_contract(self) -> bool:
        """Whether it is kept whatever the load."""
        return not (self.is_auto or self.is_default or self.has_deadline)

    def is_elastic(self, *, is_seeded: bool) -> bool:
        """Whether load may change it.

        The text of a request with a seed must not depend on who else is there; a deadline's may.
        """
        return self.has_deadline or not (self.is_contract or is_seeded)

    @property
    def blocks(self) -> int | None:
        """Blocks of every token of the answer; None where the prompt, or each token, decides."""
        decides = (self.mean, self.own, self.think)
        return None if self.is_auto or any(one is not None for one in decides) else self.most

    @property
    def has_phases(self) -> bool:
        """Whether the tokens of the prompt, or of thinking, have a budget of their own."""
        return self.prefill is not None or self.think is not None

    def phase(self, *, is_prompt: bool, is_thought: bool) -> Phase:
        """The phase of a token, as reports name it."""
        if is_prompt:
            return "prompt"
        return "think" if is_thought and self.think is not None else "answer"

    def phases(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Phase, ...]:
        """The phase of each token of an answer, as reports name it."""
        if self.marks is None:
            return (self.phase(is_prompt=False, is_thought=False),) * len(answer)
        thought = self.marks.are_thought(answer, is_open=self.marks.is_open(prompt))
        return tuple(self.phase(is_prompt=False, is_thought=each) for each in thought)

    @property
    def nominal(self) -> int:
        """Blocks of a token of which nothing else is said: the most, or the mean rounded down."""
        return self.most if self.mean is None else math.floor(self.mean)

    @property
    def prompt(self) -> int:
        """Blocks of a token of the prompt, before anything is chosen or lowered."""
        return self.nominal if self.prefill is None else self.prefill

    def wanted(self, choose: Callable[[], int]) -> int:
        """Blocks of a token of the answer without load, at most.

        Args:
            choose: Asks the Budget Predictor.
        """
        return self.clamp(choose()) if self.is_auto else self.most

    def clamp(self, blocks: int) -> int:
        """The nearest number of blocks that a token of the answer may run."""
        return min(max(blocks, self.least), self.most)

    def depths(self, ledger: DepthPrices | None = None) -> tuple[int, ...]:
        """Numbers of blocks that are asked for: first the prompt's, then the answer's extremes.

        Args:
            ledger: The model's, if its levels are to stand for a mean.
        """
        answer: Sequence[int] = (self.least, self.most)
        if self.mean is not None and ledger is not None:
            answer = ledger.levels
        thought = () if self.think is None else (self.think,)
        return tuple(dict.fromkeys((self.prompt, *thought, *answer)))

    def source(self, ledger: DepthPrices | None = None) -> BudgetSource | None:
        """Who says how many blocks a token runs; None where the predictor is to choose.

        Args:
            ledger: The model's, which spends a mean.

        Raises:
            BudgetError: It is a deadline.
        """
        if self.is_auto:
            return None
        if self.has_deadline:
            raise BudgetError(
                "a deadline is kept by a server, which knows what a token takes: name a fraction "
                'such as 0.6 or a count such as "18 blocks" here, or ask buddy serve'
            )
        if self.think is not None:
            assert self.marks is not None  # `check` refuses thinking without them
            return ThinkingBudget(self.prompt, self.think, self.most, self.marks)
        answer = self.token_source(ledger) or ConstantBudget(self.most)
        return answer if self.prefill is None else PhasedBudget(self.prefill, answer)

    def token_source(self, ledger: DepthPrices | None) -> BudgetSource | None:
        """Who says it of each token of the answer; None where one number holds for all."""
        if self.mean is None:
            return self.own
        assert ledger is not None  # `check` refuses a mean without one
        return LedgerBudget(ledger, self.mean)

    def check(self, limits: Limits) -> None:
        """Refuse what a model cannot spend, whatever its policy.

        Raises:
            BudgetError: It has no predictor or ledger for it, or the bounds leave nothing.
        """
        if self.is_auto and not limits.has_predictor:
            raise BudgetError(
                "budget 'auto' needs a trained Budget Predictor and this model has none: "
                'name a budget such as 0.75 or "18 blocks"'
            )
        if self.mean is not None:
            check_mean(self.mean, limits.means)
        if self.think is not None and self.marks is None:
            raise BudgetError(
                "a budget for think needs marks around thinking, such as <think> and </think>, and "
                'this model\'s chat template has none: expected budgets for "prompt" and "answer" '
                "alone"
            )
        if self.least > self.most:
            raise BudgetError(
                f"a budget from {self.least} to {self.most} blocks is none: the least must not be "
                "above the most"
            )

    @property
    def label(self) -> str:
        """The budget in a few characters, as keys of sample logs have it."""
        if self.is_auto:
            return "auto"
        answer = str(self.most) if self.mean is None else f"mean {self.mean}"
        if self.think is not None:
            return f"{self.prompt}+{self.think}+{answer}"
        return answer if self.prefill is None else f"{self.prefill}+{answer}"

    @property
    def title(self) -> str:
        """What a label says of it beside its number of blocks."""
        if self.is_auto:
            return " auto"
        answer = "" if self.mean is None else f" mean {float(self.mean):g}"
        if self.think is not None:
            answer = f", thinking at {self.think}"
        return answer if self.prefill is None else f"{answer}, prompt at {self.prefill}"

    def written(self, num_blocks: int) -> str | None:
        """The budget as records write it; None where the answer's is a number of blocks."""
        if self.is_auto:
            return "auto"
        if self.think is not None:
            return (
                f"prompt:{self.prompt} blocks,think:{self.think} blocks,answer:{self.most} blocks"
            )
        return None if self.mean is None else f"mean:{float(self.mean / num_blocks):g}"
