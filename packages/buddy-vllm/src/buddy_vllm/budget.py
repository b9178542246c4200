"""A budget as a request writes it: a share of the blocks, a count, or `auto`."""

import math
import re
import reprlib
from fractions import Fraction
from typing import Final, Literal

from buddy_vllm.errors import BudgetError

AUTO: Final = "auto"
"""Leaves the choice to the Budget Predictor."""
LEAST_BLOCKS: Final = 3
"""The first block, the last, and one to choose."""

_AUTO = re.compile(r"\s*auto\s*", re.ASCII | re.IGNORECASE)
_COUNT = re.compile(r"\s*([0-9]{1,9}) *blocks?\s*", re.ASCII | re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(%?)\s*", re.ASCII)
_EXPECTED = 'a fraction in (0, 1] such as 0.6, a count such as "18 blocks", or "auto"'


def read_budget(value: object, num_blocks: int, least: int = LEAST_BLOCKS) -> int | Literal["auto"]:
    """Blocks that a request may run, first and last included.

    A fraction is rounded to whole blocks; a half goes down, so that no budget is exceeded.

    Args:
        value: As JSON gave it: `0.6`, `"0.6"`, `"60%"`, `"18 blocks"` or `"auto"`.
        num_blocks: Blocks of the model.
        least: Blocks that run whatever the budget, and at least 3.

    Raises:
        BudgetError: It cannot be read, or the model cannot spend it.
    """
    if isinstance(value, str):
        if _AUTO.fullmatch(value):
            return AUTO
        if count := _COUNT.fullmatch(value):
            return _spendable(int(count[1]), num_blocks, least, value)
        share = _SHARE.fullmatch(value)
        if share is None:
            raise _unreadable(value)
        exact = Fraction(share[1]) / (100 if share[2] else 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise _unreadable(value)
        # A float is the decimal that was written.
        exact = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    else:
        raise _unreadable(value)
    if not 0 < exact <= 1:
        whole = 1 < exact < 10**9 and exact.denominator == 1
        hint = f'; for a count write "{exact} blocks"' if whole else ""
        raise BudgetError(f"budget {_shown(value)} is not allowed: expected {_EXPECTED}{hint}")
    return _spendable(math.ceil(exact * num_blocks - Fraction(1, 2)), num_blocks, least, value)


def _spendable(blocks: int, num_blocks: int, least: int, value: object) -> int:
    least = max(1, min(max(least, LEAST_BLOCKS), num_blocks))
    if not least <= blocks <= num_blocks:
        raise BudgetError(
            f"budget {_shown(value)} comes to {blocks} blocks: expected {least} to {num_blocks} "
            f"blocks, or a fraction from {least / num_blocks:.3g} to 1"
        )
    return blocks


def _unreadable(value: object) -> BudgetError:
    return BudgetError(f"budget {_shown(value)} cannot be read: expected {_EXPECTED}")


def _shown(value: object) -> str:
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python writes no number of so many digits
        return "of thousands of digits"
