"""A budget: how many Transformer blocks a sequence may run, first and last included."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from buddy.errors import BudgetError, shown

MIN_BLOCKS: Final = 3
"""The first block feeds the router, the last feeds the head, and one is left to choose. A model of
fewer blocks has nothing to choose, and runs at full depth alone."""

AUTO: Final = "auto"
"""The budget that leaves the choice to the Budget Predictor."""


_COUNT = re.compile(r"([+-]?\d{1,9})\s*blocks?")
_EXAMPLES = 'a fraction in (0, 1] such as 0.6, a count such as "18 blocks", or "auto"'


def least_blocks(num_blocks: int) -> int:
    """The smallest budget of a model: three blocks, or full depth where it has fewer."""
    return max(1, min(MIN_BLOCKS, num_blocks))


def _allowed(num_blocks: int) -> str:
    least = least_blocks(num_blocks)
    if least >= num_blocks:
        plural = "" if num_blocks == 1 else "s"
        return f"full depth alone, {num_blocks} block{plural}, or the fraction 1"
    return f"{least} to {num_blocks} blocks, or a fraction from {least / num_blocks:.3g} to 1"


@dataclass(frozen=True, slots=True)
class Budget:
    """Exactly `blocks` of a model's `num_blocks` blocks run, for one sequence, at every step.

    Raises:
        BudgetError: `blocks` is below 3 and not all of the model's, or above `num_blocks`.
    """

    blocks: int
    num_blocks: int

    def __post_init__(self) -> None:
        if not least_blocks(self.num_blocks) <= self.blocks <= self.num_blocks:
            raise BudgetError(
                f"budget of {self.blocks} blocks is outside what this model can run: "
                f"expected {_allowed(self.num_blocks)}"
            )

    @property
    def ratio(self) -> float:
        """Fraction of the model's blocks that run, in (0, 1]."""
        return self.blocks / self.num_blocks

    @classmethod
    def full(cls, num_blocks: int) -> "Budget":
        """The dense model."""
        return cls(num_blocks, num_blocks)

    @classmethod
    def from_ratio(cls, ratio: float, num_blocks: int) -> "Budget":
        """Round `ratio * num_blocks` to whole blocks; a half goes down, never over the budget.

        The product is taken on the decimal that the caller wrote, so 0.55 of 30 blocks is
        exactly 16.5 and runs 16.

        Raises:
            BudgetError: `ratio` is NaN, outside (0, 1], or rounds to fewer blocks than the model
                can run.

        Source: paper, section 4.2.2 (`k = round(bL) - 2`); the tie rule and the refusal of
        fewer than three blocks are ours.
        """
        least = least_blocks(num_blocks)
        if math.isnan(ratio) or not 0 < ratio <= 1:
            hint = (
                f'; for a count write "{int(ratio)} blocks"' if least <= ratio <= num_blocks else ""
            )
            raise BudgetError(f"budget {ratio:g} is not allowed: expected {_EXAMPLES}{hint}")
        exact = Fraction(repr(float(ratio))) * num_blocks
        blocks = math.ceil(exact - Fraction(1, 2))
        if blocks < least:
            raise BudgetError(
                f"budget {ratio:g} of {num_blocks} blocks rounds to {blocks}: "
                f"expected {_allowed(num_blocks)}"
            )
        return cls(blocks, num_blocks)


BudgetLike = Budget | float | int | str
"""What a caller may write: `0.6`, `"0.6"`, `"60%"`, `"18 blocks"`, `"auto"`, or a `Budget`."""


def parse_budget(value: BudgetLike, num_blocks: int) -> Budget | Literal["auto"]:
    """Read one budget as a caller writes it.

    Args:
        value: A fraction (`0.6`, `"0.6"`, `"60%"`), a count (`"18 blocks"`) or `"auto"`.
        num_blocks: Blocks of the model.

    Raises:
        BudgetError: Anything else, or a budget that the model cannot spend.
    """
    if isinstance(value, Budget):
        if value.num_blocks != num_blocks:
            raise BudgetError(
                f"a budget of {value.blocks} of {value.num_blocks} blocks is for a model of "
                f"{value.num_blocks}, and this one has {num_blocks}: give "
                f'"{value.blocks} blocks", or make a Budget for this model'
            )
        return value
    if isinstance(value, str):
        amount = read_amount(value)
        if amount == AUTO:
            return AUTO
        if isinstance(amount, int):
            return Budget(amount, num_blocks)
        return Budget.from_ratio(amount, num_blocks)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BudgetError(f"budget {value!r} cannot be read: expected {_EXAMPLES}")
    return Budget.from_ratio(float(value), num_blocks)


def read_amount(text: str) -> int | float | Literal["auto"]:
    """What a budget asks for, of a model whose blocks are not known yet.

    Returns:
        A number of blocks; a share of them, not checked; or `auto`.

    Raises:
        BudgetError: It is none of these.
    """
    plain = text.strip().lower()
    if plain == AUTO:
        return AUTO
    if count := _COUNT.fullmatch(plain):
        return int(count[1])
    try:
        return float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        raise BudgetError(f"budget {shown(text)} cannot be read: expected {_EXAMPLES}") from None


_PHASES = re.compile(r"prefill\s*:\s*([^,]+?)\s*,\s*decode\s*:\s*([^,]+?)")


def split_phases(text: str) -> tuple[str | None, str]:
    """The budget of the prompt's tokens and that of the answer's, as they are typed together.

    Args:
        text: `prefill:1.0,decode:0.5`, or one budget for both.

    Returns:
        The prompt's, None where it is that of the answer; and the answer's.

    Raises:
        BudgetError: A phase is named, and the other is not.
    """
    found = _PHASES.fullmatch(text.strip())
    if found is not None:
        return found[1], found[2]
    if ":" in text:
        raise BudgetError(
            f"budget {text!r} cannot be read: to give prompt and answer budgets of their own write "
            "prefill:1.0,decode:0.5"
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
