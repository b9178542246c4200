"""Budget requests: what a caller asks for, whatever the model, read once by `read_budget`.

A form of a budget is a class here that `FORMS` names: it reads what a user wrote, and says what
that comes to in blocks of a model. All else asks the `ResolvedBudget`, and never for the form.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Final, SupportsFloat, cast

from buddy.budget.amount import EXAMPLES, read_amount, shown_value
from buddy.budget.blocks import Budget
from buddy.budget.phases import PHASE_KEYS, written_phases
from buddy.budget.resolved import Limits, ResolvedBudget
from buddy.budget.source import BudgetSource, Progress
from buddy.errors import BudgetError, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRequest(ABC):
    """What a caller asks for."""

    text: str = field(default="", compare=False)
    """What was written, for records and messages."""
    is_auto: ClassVar[bool] = False
    """Whether the Budget Predictor is to choose."""
    no_prefill: ClassVar[str] = ""
    """Why the prompt cannot have a budget beside it; empty where it can."""

    @classmethod
    @abstractmethod
    def read(cls, value: Any) -> "BudgetRequest | None":
        """Read what a caller wrote; None where it is of another form.

        Raises:
            BudgetError: It is of this form, and wrong.
        """

    @abstractmethod
    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """The same in blocks of a model, whether it can spend them or not."""

    def resolve(self, limits: Limits) -> ResolvedBudget:
        """The same in blocks of a model.

        Raises:
            BudgetError: The model cannot spend it.
        """
        resolved = self.in_blocks(limits)
        resolved.check(limits)
        return resolved

    @property
    def number(self) -> "Blocks | None":
        """Itself, where it is one number for all tokens of any sequence."""
        return None

    def with_prefill(self, prompt: "Blocks | None") -> "BudgetRequest":
        """The same, with a budget of its own for the prompt; itself where there is none.

        Raises:
            BudgetError: Prompt and answer cannot be told apart.
        """
        if prompt is None:
            return self
        if self.no_prefill:
            raise BudgetError(self.no_prefill)
        return Phases(text=self.text, prompt=prompt, answer=self)


BudgetLike = (
    BudgetRequest
    | Budget
    | SupportsFloat
    | str
    | Mapping[str, Any]
    | BudgetSource
    | Callable[[Progress], Any]
)
"""What a caller may write: `0.6`, `"0.6"`, `"60%"`, `"18 blocks"`, `"auto"`, `"mean:0.7"`,
`"prompt:1.0,answer:0.5"`, an object of the HTTP interface, a scalar of numpy or torch, a `Budget`,
a source, or a callable that is asked at every step."""


def read_budget(value: Any) -> BudgetRequest:
    """Read a budget as a caller writes it, for whatever model.

    Args:
        value: A `BudgetLike`; None = nothing was named. What has been read is returned as it is.

    Raises:
        BudgetError: It is none.
    """
    if isinstance(value, BudgetRequest):
        return value
    for form in FORMS:
        request = form.read(value)
        if request is not None:
            text = "" if value is None else value if isinstance(value, str) else shown(value)
            return replace(request, text=text)
    raise BudgetError(
        f"budget {shown(value)} cannot be read: expected {EXAMPLES}, "
        '{"prompt": 1.0, "answer": 0.5}, {"prompt": 1.0, "think": 0.5, "answer": 1.0}, '
        '{"mean": 0.7}, {"ms_per_token": 12} or {"tokens_per_s": 80}; but for a mean, an object '
        "may also have min and max"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(BudgetRequest):
    """A number of blocks for each token: a contract."""

    amount: Fraction | int
    """A share of a model's blocks, or a count of them."""
    of: int | None = None
    """Blocks of the one model that it is for; None = any."""

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read a fraction, a count or a `Budget`; it is the last form, and refuses what is none."""
        if isinstance(value, Mapping):
            return None
        if isinstance(value, Budget):
            return cls(amount=value.blocks, of=value.num_blocks)
        return cls(amount=read_amount(value))

    @property
    def number(self) -> "Blocks":
        """Itself."""
        return self

    def blocks(self, num_blocks: int) -> int:
        """Whole blocks of a model.

        Raises:
            BudgetError: The model cannot run so many, or it is for one of another depth.
        """
        if self.of is not None and self.of != num_blocks:
            raise BudgetError(
                f"a budget of {self.amount} of {self.of} blocks is for a model of {self.of}, and "
                f"this one has {num_blocks}: write it as a fraction, such as "
                f'{self.amount / self.of:.2g}, or as a count, "{self.amount} blocks"'
            )
        if isinstance(self.amount, int):
            return Budget(self.amount, num_blocks).blocks
        return Budget.from_ratio(self.amount, num_blocks).blocks

    def exact(self, num_blocks: int) -> Fraction:
        """Blocks of a model, not rounded, and perhaps more than it has."""
        return Fraction(self.amount) * (1 if isinstance(self.amount, int) else num_blocks)

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """The same number for prompt and answer."""
        blocks = self.blocks(limits.num_blocks)
        return ResolvedBudget(kind="fixed", least=blocks, most=blocks)


def read_blocks(value: Any, what: str | None = None) -> Blocks:
    """Read a budget that must be a number of blocks.

    Args:
        value: A fraction or a count.
        what: Names it in messages; None where whoever asks does.

    Raises:
        BudgetError: It is none.
    """
    with _named(what):
        number = Blocks(amount=read_amount(None)) if value is None else read_budget(value).number
    if number is None:
        raise BudgetError(
            f"{what or 'the budget'} must be a fraction or a count of blocks, such as 1.0 or "
            f'"24 blocks", got {shown(value)}'
        )
    return number


@contextmanager
def _named(what: str | None) -> Iterator[None]:
    """Say of which part of a budget an error within is."""
    try:
        yield
    except BudgetError as error:
        raise (error if what is None else BudgetError(f"{what}: {error}")) from None


@dataclass(frozen=True, slots=True)
class Bounds:
    """The `min` and `max` of an object."""

    low: Blocks | None = None
    high: Blocks | None = None

    @classmethod
    def read(cls, budget: Mapping[str, Any]) -> "Bounds":
        """Read them where they are given."""
        low, high = (
            read_blocks(budget[name], f"budget.{name}") if name in budget else None
            for name in ("min", "max")
        )
        return cls(low, high)

    def blocks(self, num_blocks: int) -> tuple[int, int]:
        """The least and the most blocks of a model.

        Raises:
            BudgetError: The least is above the most.
        """
        low = 0 if self.low is None else self.low.blocks(num_blocks)
        high = num_blocks if self.high is None else self.high.blocks(num_blocks)
        if low > high:
            raise BudgetError(f"budget.min, {low} blocks, is above budget.max, {high} blocks")
        return low, high


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases(BudgetRequest):
    """A budget for the prompt's tokens, another for the answer's, and perhaps one for thinking."""

    prompt: Blocks
    think: Blocks | None = None
    answer: BudgetRequest
    bounds: Bounds = Bounds()
    """Which both must keep."""
    no_prefill = "the prompt has a budget in the answer's already: leave prefill_budget out"

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read `prompt:1.0,think:0.6,answer:1.0`, or an object like it; think may be left out."""
        if isinstance(value, str) and ":" in value:
            prompt, think, answer = written_phases(value)
            first = read_blocks(prompt, "prompt")
            if think is None:
                with _named("answer"):
                    last = read_budget(answer)
                return last.with_prefill(first)
            last = read_blocks(answer, "answer beside thinking")
            return cls(prompt=first, think=read_blocks(think, "think"), answer=last)
        keys = next((keys for keys in PHASE_KEYS if _has_keys(value, set(keys))), ())
        if not keys:
            return None
        first, *between, last = (read_blocks(value[key], f"budget.{key}") for key in keys)
        bounds = Bounds.read(value)
        return cls(prompt=first, think=next(iter(between), None), answer=last, bounds=bounds)

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """Each in blocks."""
        resolved = self.answer.in_blocks(limits)
        prompt, think, marks = self.prompt.blocks(limits.num_blocks), None, None
        if self.think is not None:
            think, marks = self.think.blocks(limits.num_blocks), limits.find_marks()
        low, high = self.bounds.blocks(limits.num_blocks)
        for name, blocks in (("prompt", prompt), ("think", think), ("answer", resolved.most)):
            if blocks is not None and not low <= blocks <= high:
                raise BudgetError(f"budget.{name}, {blocks} blocks, is outside its own min and max")
        is_own = resolved.own is not None or prompt != resolved.prompt
        return replace(resolved, prefill=prompt if is_own else None, think=think, marks=marks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean(BudgetRequest):
    """A mean number of blocks over the tokens of the answer, which a ledger spends: a contract."""

    mean: Blocks

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read `mean:0.7`, or an object with a mean and perhaps a budget for the prompt."""
        is_object = any(_has_keys(value, {"mean"}, {name}) for name in _PROMPT_KEYS)
        prompt, match = None, _MEAN.fullmatch(value) if isinstance(value, str) else None
        if match is None and not is_object:
            return None
        try:
            mean = cls(mean=read_blocks(value["mean"] if match is None else match[1]))
        except BudgetError:
            raise BudgetError(
                f"budget {shown_value(value)} cannot be read: name a mean such as mean:0.7 or "
                '"mean:18 blocks", a fraction in (0, 1] or a count'
            ) from None
        for name in _PROMPT_KEYS & value.keys() if is_object else ():
            prompt = read_blocks(value[name], f"budget.{name}")
        return mean.with_prefill(prompt)

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """The mean itself is not rounded."""
        mean = self.mean.exact(limits.num_blocks)
        most = math.ceil(mean)
        return ResolvedBudget(kind="mean", least=most, most=most, mean=mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(BudgetRequest):
    """The Budget Predictor chooses from the prompt; under load, less."""

    is_auto = True
    no_prefill = (
        "budget 'auto' is chosen for prompt and answer together: leave prefill_budget out, or "
        "name both as numbers"
    )

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read `auto`."""
        return cls() if isinstance(value, str) and _AUTO.fullmatch(value) else None

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """Any depth between the bounds of the model and its server."""
        return ResolvedBudget(kind="auto", least=limits.least, most=limits.num_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadline(BudgetRequest):
    """The greatest depth that the time for a token allows."""

    ms_per_token: float
    bounds: Bounds = Bounds()

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read an object with `ms_per_token` or `tokens_per_s`."""
        name = next((n for n in ("ms_per_token", "tokens_per_s") if _has_keys(value, {n})), None)
        if name is None:
            return None
        number = value[name]
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        # Within these bounds its inverse is finite too.
        if not is_number or not 1e-6 <= number <= 1e9:
            raise BudgetError(
                f"budget.{name} must be a number from 1e-06 to 1e+09, got {shown(number)}"
            )
        ms = float(number) if name == "ms_per_token" else 1000 / number
        return cls(ms_per_token=ms, bounds=Bounds.read(value))

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """The server's least holds, but not against what the client allows at most."""
        low, most = self.bounds.blocks(limits.num_blocks)
        least = min(max(limits.least, low), most)
        return ResolvedBudget(
            kind="deadline", least=least, most=most, ms_per_token=self.ms_per_token
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DefaultBudget(BudgetRequest):
    """Nothing was named: full depth or a server's default, and under load less."""

    most: Blocks | None = None

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Read None."""
        return cls() if value is None else None

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """Lowered only where the server has a target for the time between tokens."""
        most = limits.num_blocks if self.most is None else self.most.blocks(limits.num_blocks)
        return ResolvedBudget(kind="default", least=min(limits.least, most), most=most)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSource(BudgetRequest):
    """A source of the caller's own, or a callable that names a budget at every step."""

    source: BudgetSource

    @classmethod
    def read(cls, value: Any) -> BudgetRequest | None:
        """Take what can be asked."""
        if hasattr(value, "ask"):
            return cls(source=value)
        return cls(source=CalledBudget(cast(Any, value))) if callable(value) else None

    def in_blocks(self, limits: Limits) -> ResolvedBudget:
        """The source says how many, and is checked when it does."""
        most = limits.num_blocks
        return ResolvedBudget(kind="own", least=limits.least, most=most, own=self.source)


@dataclass(frozen=True, slots=True)
class CalledBudget:
    """The source of a callable, which names a budget as a caller writes one."""

    call: Callable[[Progress], BudgetLike]

    def ask(self, progress: Progress) -> int:
        """What the callable says.

        Raises:
            BudgetError: It says what is no number of blocks.
        """
        number = read_blocks(self.call(progress), "what a callable returns at a step")
        return number.blocks(progress.num_blocks)


FORMS: tuple[type[BudgetRequest], ...]
FORMS = (DefaultBudget, OwnSource, Mean, Phases, Deadline, Auto, Blocks)
"""Asked in this order; the last refuses what none has read."""

_AUTO: Final = re.compile(r"\s*auto\s*", re.ASCII | re.IGNORECASE)
_MEAN: Final = re.compile(r"\s*mean\s*:(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_PROMPT_KEYS: Final = frozenset({"prompt", "prefill"})
_BOUNDS: Final = frozenset({"min", "max"})


def _has_keys(value: Any, keys: Set[str], others: Set[str] = _BOUNDS) -> bool:
    """Whether it is an object with these keys, and perhaps some of the others."""
    return isinstance(value, Mapping) and keys <= value.keys() <= keys | others
