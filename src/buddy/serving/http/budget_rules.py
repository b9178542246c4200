"""What a request says of its budget, in any place and form, becomes a `ResolvedBudget`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from buddy.budget.blocks import Budget, check_spendable, least_blocks
from buddy.budget.read import AUTO, Mean, check_mean, no_predictor, parse_budget, read_mean
from buddy.errors import BudgetError, shown
from buddy.serving.request import Auto, Deadline, DefaultBudget, Fixed, OnAverage, ResolvedBudget

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Names that OpenAI's clients give to efforts."""

_FORMS: Final = (
    'a fraction such as 0.6, a count such as "18 blocks", "auto", {"prefill": 1.0, "decode": 0.5}, '
    '{"mean": 0.7}, {"ms_per_token": 12} or {"tokens_per_s": 80}'
)
_KINDS: Final = (("prefill", "decode"), ("ms_per_token",), ("tokens_per_s",))


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRules:
    """What the server makes of budgets.

    Raises:
        BudgetError: A default, an effort's budget or the smallest budget cannot be.
    """

    num_blocks: int
    has_predictor: bool
    means: tuple[int, int] | None = None
    """The smallest and the largest mean that the model's ledger spends, in blocks."""
    min_budget: str | None = None
    """Below it no elastic budget goes; as clients write budgets. None = what the model can run."""
    num_pinned: int = 1
    """Blocks that the policy runs whatever the budget."""
    default: str | None = None
    """Of requests that name nothing; None = full depth."""
    efforts: Mapping[str, str] = field(default_factory=dict)
    """From `reasoning_effort` to a budget; where it is empty, efforts say nothing."""

    def __post_init__(self) -> None:
        self.floor()
        self._check_own(self._unnamed())
        for name, budget in self.efforts.items():
            if name not in EFFORTS:
                raise BudgetError(
                    f"no client asks for effort {shown(name)}: expected {', '.join(EFFORTS)}"
                )
            self._check_own(self._plain(budget))

    def _check_own(self, wish: ResolvedBudget) -> None:
        """Refuse a budget of the server's own that every request would be refused for."""
        budgets = {wish.prefill, wish.decode} if isinstance(wish, Fixed) else {wish.most}
        check_spendable(budgets, self.num_blocks, range(self.num_pinned))

    def floor(self) -> int:
        """Blocks below which no elastic budget goes."""
        least = least_blocks(self.num_blocks, self.num_pinned)
        if self.min_budget is None:
            return least
        return max(least, self._blocks(self.min_budget, "the smallest budget"))

    def read(self, budget: Any, suffix: str | None, effort: str | None) -> ResolvedBudget:
        """The budget of a request.

        Args:
            budget: The field `budget`, None if not given. It goes before all others.
            suffix: What stands after `@` in the model's name, None if nothing does.
            effort: The field `reasoning_effort`.

        Raises:
            BudgetError: One of them cannot be read or spent, even one that another goes before.
        """
        named = [] if budget is None else [self._named(budget)]
        if suffix is not None:
            named.append(self._plain(suffix))
        if effort is not None and self.efforts:
            if effort not in self.efforts:
                raise BudgetError(
                    f"reasoning_effort {shown(effort)} has no budget here: expected "
                    f"{', '.join(self.efforts)}"
                )
            named.append(self._plain(self.efforts[effort]))
        return named[0] if named else self._unnamed()

    def _unnamed(self) -> ResolvedBudget:
        if self.default is None:
            return DefaultBudget(least=self.floor(), most=self.num_blocks)
        wish = self._plain(self.default)
        if isinstance(wish, Fixed) and not isinstance(wish, OnAverage):
            return DefaultBudget(least=min(self.floor(), wish.decode), most=wish.decode)
        return wish

    def _named(self, budget: Any) -> ResolvedBudget:
        return self._object(budget) if isinstance(budget, Mapping) else self._plain(budget)

    def _read(self, budget: Any) -> Budget | Literal["auto"]:
        if not isinstance(budget, int | float | str) or isinstance(budget, bool):
            raise BudgetError(f"budget {shown(budget)} cannot be read: expected {_FORMS}")
        return parse_budget(budget, self.num_blocks)

    def _plain(self, budget: Any) -> ResolvedBudget:
        """Of a fraction, a count, `auto`, or a mean."""
        mean = read_mean(budget)
        if mean is not None:
            return self._mean(mean, None)
        read = self._read(budget)
        if read != AUTO:
            return Fixed(prefill=read.blocks, decode=read.blocks)
        if not self.has_predictor:
            raise no_predictor()
        return Auto(least=self.floor(), most=self.num_blocks)

    def _blocks(self, budget: Any, what: str) -> int:
        read = self._read(budget)
        if read == AUTO:
            raise BudgetError(f"{what} must be a fraction or a count of blocks, got 'auto'")
        return read.blocks

    def _object(self, budget: Mapping[str, Any]) -> ResolvedBudget:
        if set(budget) in ({"mean"}, {"mean", "prefill"}):
            return self._mean(Mean.read(budget["mean"]), budget.get("prefill"))
        kind = budget.keys() - {"min", "max"}
        if not any(kind == set(known) for known in _KINDS):
            raise BudgetError(
                f"budget {shown(dict(budget))} cannot be read: expected {_FORMS}; but for "
                "a mean, an object may also have min and max"
            )
        low, high = self._bounds(budget)
        if "decode" in budget:
            return self._phases(budget, low, high)
        ms = _milliseconds(budget)
        most = self.num_blocks if high is None else high
        least = max(self.floor(), 0 if low is None else low)
        return Deadline(ms_per_token=ms, least=min(least, most), most=most)

    def _mean(self, read: Mean, prefill: Any) -> OnAverage:
        """A mean over the answer; the prompt runs it, rounded down, where nothing is said of it."""
        mean = read.blocks(self.num_blocks)
        check_mean(mean, self.means)
        named = None if prefill is None else self._blocks(prefill, "budget.prefill")
        return OnAverage(prefill=named or math.floor(mean), decode=math.ceil(mean), mean=mean)

    def _bounds(self, budget: Mapping[str, Any]) -> tuple[int | None, int | None]:
        low, high = (
            self._blocks(budget[name], f"budget.{name}") if name in budget else None
            for name in ("min", "max")
        )
        if low is not None and high is not None and low > high:
            raise BudgetError(f"budget.min, {low} blocks, is above budget.max, {high} blocks")
        return low, high

    def _phases(self, budget: Mapping[str, Any], low: int | None, high: int | None) -> Fixed:
        """A contract for prompt and answer; bounds that it breaks are a contradiction."""
        blocks = {
            name: self._blocks(budget[name], f"budget.{name}") for name in ("prefill", "decode")
        }
        for name, each in blocks.items():
            if (low is not None and each < low) or (high is not None and each > high):
                raise BudgetError(
                    f"budget.{name} is {each} blocks, and outside its own min and max"
                )
        return Fixed(**blocks)


def _milliseconds(budget: Mapping[str, Any]) -> float:
    """For one token."""
    name = "ms_per_token" if "ms_per_token" in budget else "tokens_per_s"
    value = budget[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Within these bounds its inverse is finite too.
    if not is_number or not (1e-6 <= value <= 1e9 and math.isfinite(value)):
        raise BudgetError(f"budget.{name} must be a number from 1e-06 to 1e+09, got {shown(value)}")
    return float(value) if name == "ms_per_token" else 1000 / value


def split_model(name: str, served: str) -> tuple[str, str | None]:
    """The model and the budget in a name such as `smollm2-135m-buddy@0.6`.

    Args:
        name: As a client writes it.
        served: The name of the model that is served, which may have an `@` of its own.
    """
    if name == served or "@" not in name:
        return name, None
    model, _, budget = name.rpartition("@")
    return model, budget


def parse_efforts(text: str) -> dict[str, str]:
    """Read `low=0.5,medium=0.7,high=1.0`.

    Raises:
        BudgetError: It is written otherwise, or names an effort twice.
    """
    made: dict[str, str] = {}
    for part in text.split(","):
        name, equals, budget = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not budget or name in made:
            raise BudgetError(
                f"efforts {shown(text)} cannot be read: expected such as "
                "low=0.5,medium=0.7,high=1.0, each effort once"
            )
        made[name] = budget
    return made
