"""What a request says of its budget, in any place that it may, in blocks of the model served."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from buddy.budget.blocks import check_spendable, least_blocks
from buddy.budget.request import BudgetLike, BudgetRequest, DefaultBudget, read_blocks, read_budget
from buddy.budget.resolved import Limits, ResolvedBudget
from buddy.budget.thinking import ThinkingMarks
from buddy.errors import BudgetError, shown

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Names that OpenAI's clients give to efforts."""


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
    find_marks: Callable[[], ThinkingMarks | None] = lambda: None
    """Finds the marks around what the model thinks aloud."""
    min_budget: BudgetLike | None = None
    """Below it no elastic budget goes; None = what the model can run."""
    num_pinned: int = 1
    """Blocks that the policy runs whatever the budget."""
    default: BudgetLike | None = None
    """The budget of requests that name none; None = full depth."""
    efforts: Mapping[str, BudgetLike] = field(default_factory=dict)
    """Budgets by `reasoning_effort`; where there are none, efforts say nothing."""

    def __post_init__(self) -> None:
        for name in self.efforts:
            if name not in EFFORTS:
                raise BudgetError(
                    f"no client asks for effort {shown(name)}: expected {', '.join(EFFORTS)}"
                )
        for budget in (self._default(), *map(read_budget, self.efforts.values())):
            # What every request would be refused for is refused at the start.
            depths = budget.resolve(self.limits).depths()
            check_spendable(depths, self.num_blocks, range(self.num_pinned))

    @property
    def floor(self) -> int:
        """Blocks below which no elastic budget goes."""
        least = least_blocks(self.num_blocks, self.num_pinned)
        if self.min_budget is None:
            return least
        named = read_blocks(self.min_budget, "the smallest budget")
        return max(least, named.blocks(self.num_blocks))

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return Limits(
            num_blocks=self.num_blocks,
            least=self.floor,
            has_predictor=self.has_predictor,
            means=self.means,
            find_marks=self.find_marks,
        )

    def _default(self) -> BudgetRequest:
        """The budget of requests that name none; a number may be lowered then."""
        request = read_budget(self.default)
        return request if request.number is None else DefaultBudget(most=request.number)

    def read(self, budget: Any, suffix: str | None, effort: str | None) -> ResolvedBudget:
        """The budget of a request.

        Args:
            budget: The field `budget`, None if not given. It goes before all others.
            suffix: What stands after `@` in the model's name, None if nothing does.
            effort: The field `reasoning_effort`.

        Raises:
            BudgetError: One of them cannot be read or spent, even one that another goes before.
        """
        named = [read_budget(value) for value in (budget, suffix) if value is not None]
        if effort is not None and self.efforts:
            if effort not in self.efforts:
                raise BudgetError(
                    f"reasoning_effort {shown(effort)} has no budget here: expected "
                    f"{', '.join(self.efforts)}"
                )
            named.append(read_budget(self.efforts[effort]))
        limits = self.limits
        first, *_ = [request.resolve(limits) for request in named or [self._default()]]
        return first


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


def parse_efforts(text: str) -> dict[str, BudgetRequest]:
    """Read `low=0.5,medium=0.7,high=1.0`.

    Raises:
        BudgetError: It is written otherwise, or names an effort twice.
    """
    budgets: dict[str, BudgetRequest] = {}
    for part in text.split(","):
        name, equals, budget = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not budget or name in budgets:
            raise BudgetError(
                f"efforts {shown(text)} cannot be read: expected such as "
                "low=0.5,medium=0.7,high=1.0, each effort once"
            )
        budgets[name] = read_budget(budget)
    return budgets
