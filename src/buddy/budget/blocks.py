"""Numbers of Transformer blocks that may run, and those that a model can run at all."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from buddy.budget.amount import share_of
from buddy.errors import BudgetError

MIN_BLOCKS: Final = 3
"""The first block feeds the router, the last feeds the head, and one is left to choose. A model of
fewer blocks has nothing to choose, and runs at full depth alone."""


def least_blocks(num_blocks: int, num_pinned: int = 1) -> int:
    """The smallest budget of a model: three blocks, or full depth where it has fewer.

    Args:
        num_blocks: Of the model.
        num_pinned: Blocks that a policy runs whatever the budget.
    """
    return max(num_pinned, min(MIN_BLOCKS, num_blocks))


def check_spendable(budgets: Collection[int], num_blocks: int, pinned: Sequence[int]) -> None:
    """Refuse budgets that pinned blocks alone exceed, or that the model has not the blocks for.

    Raises:
        BudgetError: There is such a budget.
    """
    always = len({block % num_blocks for block in pinned})
    wrong = [blocks for blocks in budgets if not always <= blocks <= num_blocks]
    if wrong:
        raise BudgetError(
            f"budget of {wrong[0]} blocks cannot be spent: {always} of the {num_blocks} blocks "
            f"always run under this policy, so expected {always} to {num_blocks} blocks; "
            "for less choose another policy, such as static or random"
        )


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
    def from_ratio(cls, ratio: int | float | Fraction, num_blocks: int) -> "Budget":
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
        exact = share_of(ratio) * num_blocks
        blocks = math.ceil(exact - Fraction(1, 2))
        if blocks < least:
            raise BudgetError(
                f"budget {float(ratio):g} of {num_blocks} blocks rounds to {blocks}: "
                f"expected {_allowed(num_blocks)}"
            )
        return cls(blocks, num_blocks)
