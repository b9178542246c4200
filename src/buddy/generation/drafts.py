"""What a text is drafted from: n-grams of the text itself, blocks of a low budget, or both."""

from dataclasses import dataclass
from typing import Any, Final

from buddy.budget.request import Blocks, read_blocks
from buddy.errors import BudgetError, shown

DraftsLike = Any
"""What `read_drafts` reads."""
_NGRAM: Final = "ngram"


@dataclass(frozen=True, slots=True)
class Drafts:
    """What tokens are drafted from before they are verified together.

    Attributes:
        ngrams: What followed the last tokens where they stood before.
        budget: Where these say nothing, the model's own tokens at this budget; None = no others.
    """

    ngrams: bool = False
    budget: Blocks | None = None

    def __bool__(self) -> bool:
        return self.ngrams or self.budget is not None


def read_drafts(value: Any) -> Drafts:
    """Read `none`, `ngram`, a budget, or `ngram+BUDGET`.

    Raises:
        BudgetError: It is none of these.
    """
    if value is None or isinstance(value, Drafts):
        return value or Drafts()
    kind, plus, rest = value.partition("+") if isinstance(value, str) else ("", "", "")
    kind = kind.strip()
    if kind in ("none", _NGRAM) and not plus:
        return Drafts(ngrams=kind == _NGRAM)
    wrong = BudgetError(
        'drafts must be "none", "ngram", a budget such as 0.5 or "12 blocks", or both as in '
        f'"ngram+0.5", got {shown(value)}'
    )
    if plus and kind != _NGRAM:
        raise wrong
    try:
        return Drafts(ngrams=kind == _NGRAM, budget=read_blocks(rest if plus else value))
    except BudgetError as error:  # it names other budgets, which draft nothing
        raise wrong from error
