"""A share of the blocks, or a count of them: exactly as a caller wrote it."""

import re
import reprlib
from fractions import Fraction
from typing import Any, Final

from buddy.errors import BudgetError

_WRITTEN = re.compile(
    r"""\s*(
        (?P<count> [0-9]{1,9} ) [ ]* blocks?
      | (?P<number> [0-9]{1,9} (\.[0-9]{0,30})? | \.[0-9]{1,30} ) (?P<percent> %? )
    )\s*""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)
EXAMPLES: Final = 'a fraction in (0, 1] such as 0.6, a count such as "18 blocks", or "auto"'


def read_amount(value: Any) -> Fraction | int:
    """Read a number of blocks as a caller writes it, for whatever model.

    Args:
        value: A fraction (`0.6`, `"0.6"`, `"60%"`), as a scalar of numpy or torch too, or a count
            (`"18 blocks"`).

    Returns:
        A share of the blocks in (0, 1], or a count of them.

    Raises:
        BudgetError: Anything else.
    """
    if isinstance(value, str):
        match = _WRITTEN.fullmatch(value)
        if match is None:
            raise _unreadable(value)
        if match["count"]:
            return int(match["count"])
        return share_of(Fraction(match["number"]) / (100 if match["percent"] else 1))
    number: Any = _number_in(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _unreadable(value)
    return share_of(number)


def share_of(number: Any) -> Fraction:
    """The decimal that the caller wrote, which is in (0, 1]."""
    if not 0 < number <= 1:  # false of NaN
        is_count = number > 1 and number == number // 1 and number < 10**9
        hint = f'; for a count write "{int(number)} blocks"' if is_count else ""
        shown = f"{float(number):g}" if abs(number) < 10**9 else shown_value(number)
        raise BudgetError(f"budget {shown} is not allowed: expected {EXAMPLES}{hint}")
    return number if isinstance(number, Fraction) else Fraction(repr(float(number)))


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


def shown_value(value: object) -> str:
    """The value on one line, cut short."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # Python writes no number of so many digits
        return "of thousands of digits"


def _unreadable(value: object) -> BudgetError:
    return BudgetError(f"budget {shown_value(value)} cannot be read: expected {EXAMPLES}")
