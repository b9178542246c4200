"""Budgets as they are written: shares, counts, `auto`, means and phases."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, SupportsFloat

from buddy.budget.blocks import EXAMPLES, Budget, share_of, shown_value
from buddy.errors import BudgetError

AUTO: Final = "auto"
"""The budget that leaves the choice to the Budget Predictor."""

_WRITTEN = re.compile(
    r"""\s*(
        (?P<count> [0-9]{1,9} ) [ ]* blocks?
      | (?P<number> [0-9]{1,9} (\.[0-9]{0,30})? | \.[0-9]{1,30} ) (?P<percent> %? )
      | auto
    )\s*""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
BudgetLike = Budget | SupportsFloat | str
"""What a caller may write: `0.6`, `"0.6"`, `"60%"`, `"18 blocks"`, `"auto"`, a `Budget`, or a
scalar of numpy or torch."""


def read_budget(value: BudgetLike) -> int | Fraction | Literal["auto"]:
    """Read one budget as a caller writes it, for whatever model.

    Args:
        value: A fraction (`0.6`, `"0.6"`, `"60%"`), a count (`"18 blocks"`) or `"auto"`.

    Returns:
        A count of blocks, a share of them in (0, 1], or `"auto"`.

    Raises:
        BudgetError: Anything else.
    """
    if isinstance(value, Budget):
        return value.blocks
    if isinstance(value, str):
        found = _WRITTEN.fullmatch(value)
        if found is None:
            raise _unreadable(value)
        if found["count"]:
            return int(found["count"])
        if not found["number"]:
            return AUTO
        return share_of(Fraction(found["number"]) / (100 if found["percent"] else 1))
    number: Any = _number_in(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _unreadable(value)
    return share_of(number)


def parse_budget(value: BudgetLike, num_blocks: int) -> Budget | Literal["auto"]:
    """Read one budget for a model; see `read_budget`.

    Raises:
        BudgetError: It cannot be read, or the model cannot spend it, or it is a `Budget` of a
            model of another depth.
    """
    if isinstance(value, Budget):
        if value.num_blocks != num_blocks:
            raise BudgetError(
                f"a budget of {value.blocks} of {value.num_blocks} blocks is for a model of "
                f"{value.num_blocks}, and this one has {num_blocks}: write it as a fraction, such "
                f'as {value.ratio:.2g}, or as a count, "{value.blocks} blocks"'
            )
        return value
    read = read_budget(value)
    if isinstance(read, str):
        return AUTO
    if isinstance(read, int):
        return Budget(read, num_blocks)
    return Budget.from_ratio(read, num_blocks)


def _number_in(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch; anything else as it is.

    One of fewer bits is read as the decimal that it was made from: 0.55 in float32 is 0.55.
    """
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    try:
        number = value.item()
    except (RuntimeError, TypeError, ValueError):  # a tensor without data
        return value
    if isinstance(number, float) and value.itemsize < 8:
        return float(f"{number:.{6 if value.itemsize == 4 else 3}g}")
    return number


def no_predictor() -> BudgetError:
    """What to raise where `auto` is asked of a model that cannot choose."""
    return BudgetError(
        "budget 'auto' needs a trained Budget Predictor and this model has none: "
        'name a budget such as 0.75 or "18 blocks"'
    )


def _unreadable(value: object) -> BudgetError:
    return BudgetError(f"budget {shown_value(value)} cannot be read: expected {EXAMPLES}")


_MEAN = re.compile(r"\s*mean\s*:(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)


def read_mean(value: object) -> "Mean | None":
    """Read a mean over the tokens of an answer, which a ledger spends: `mean:0.7`.

    Returns:
        The mean; None where none is asked for.

    Raises:
        BudgetError: What follows `mean:` is no number.
    """
    found = _MEAN.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    try:
        return Mean.read(found[1])
    except BudgetError:
        raise BudgetError(
            f"budget {shown_value(value)} cannot be read: expected a mean that is a fraction in "
            '(0, 1] or a count, such as mean:0.7 or "mean:18 blocks"'
        ) from None


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean number of blocks over the tokens of an answer."""

    amount: Fraction | int
    """A share of a model's blocks, or a count of them."""

    @classmethod
    def read(cls, value: BudgetLike) -> "Mean":
        """Read one as a caller writes it: a fraction or a count.

        Raises:
            BudgetError: It is neither.
        """
        amount = read_budget(value)
        if amount == AUTO:
            raise BudgetError("budget 'mean:auto' cannot be read: name a mean such as mean:0.7")
        return cls(amount)

    def blocks(self, num_blocks: int) -> Fraction:
        """Of a model, not rounded."""
        if isinstance(self.amount, int):
            return Fraction(self.amount)
        return self.amount * num_blocks


def check_mean(mean: Fraction, means: tuple[int, int] | None) -> None:
    """Refuse a mean that a ledger cannot spend.

    Args:
        mean: In blocks.
        means: The smallest and the largest that it can; None where there is no ledger.

    Raises:
        BudgetError: The mean lies outside, or there is no ledger.
    """
    if means is None:
        raise BudgetError(
            f"a mean of {float(mean):g} blocks a token needs a ledger, which spends it over the "
            "tokens of an answer, and this model has none: name a budget for each token, such as "
            "0.7, or fit a ledger with buddy train-ledger"
        )
    if not means[0] <= mean <= means[1]:
        raise BudgetError(
            f"a mean of {float(mean):g} blocks a token is outside what this model's ledger spends: "
            f"expected {means[0]} to {means[1]} blocks"
        )


_PHASES = re.compile(r"\s*prefill\s*:\s*([^,]+?)\s*,\s*decode\s*:\s*([^,]+?)\s*", re.ASCII)


def split_phases(text: str) -> tuple[str | None, str]:
    """The budget of the prompt's tokens and that of the answer's, as they are typed together.

    Args:
        text: `prefill:1.0,decode:0.5`, or one budget for both; `mean:0.7` is one of the answer.

    Returns:
        The prompt's, None where it is that of the answer; and the answer's.

    Raises:
        BudgetError: A phase is named, and the other is not.
    """
    found = _PHASES.fullmatch(text)
    if found is not None:
        return found[1], found[2]
    if ":" in text and read_mean(text) is None:
        raise BudgetError(
            f"budget {shown_value(text)} cannot be read: to give prompt and answer budgets of "
            "their own write prefill:1.0,decode:0.5"
        )
    return None, text


def parse_budgets(
    value: BudgetLike | Sequence[BudgetLike], num_blocks: int, batch: int
) -> list[Budget | Literal["auto"]]:
    """Read one budget for a whole batch, or a list with one per row.

    Raises:
        BudgetError: A budget cannot be read, or the list has not `batch` entries.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [parse_budget(value, num_blocks)] * batch
    if len(value) != batch:
        raise BudgetError(
            f"got {len(value)} budgets for a batch of {batch} rows: "
            "give one budget per row, or a single budget for all"
        )
    return [parse_budget(one, num_blocks) for one in value]
