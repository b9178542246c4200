"""A record's JSON read field by field: what is missing or of the wrong type is named."""

import math
from collections.abc import Sequence
from typing import Any, Final

from buddy.errors import ResultError, shown
from buddy.lab.plots.figures import FIGURES
from buddy.settings import Range

MOST_BLOCKS: Final = 10_000
"""Deeper models are taken for damage: a figure has a column for each block."""
_MOST: Final = 2**53
_DRAWN: Final = Range(-1e306, 1e306)
"""Axes need room beyond what they show."""
_AGAIN: Final = "make the record again with the command that it names"


class Fields:
    """One object of a record.

    Args:
        value: What should be a JSON object.
        where: Its place, for messages.

    Raises:
        ResultError: It is no object.
    """

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ResultError(f"{where} must be an object, got {shown(value, 40)}; {_AGAIN}")
        self._value = value
        self.where = where

    def get(self, name: str) -> Any:
        """The field as it is, or None."""
        return self._value.get(name)

    def text(self, name: str) -> str:
        """A string that is not empty."""
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a string")
        return value

    def integer(self, name: str, low: int, high: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        value = self.get(name)
        most = _MOST if high is None else high
        if not _is_integer(value) or not low <= value <= most:
            bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise self.wrong(name, f"a whole number {bounds}")
        return int(value)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number from `low` to `high`."""
        value = self.get(name)
        if not _is_number(value) or not low <= value <= high:
            raise self.wrong(name, "a number" + _bounds(low, high))
        return float(value)

    def positive(self, name: str, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number above 0, from `low` to `high`."""
        if self.number(name, low, high) == 0:
            raise self.wrong(name, "a number above 0")
        return self.number(name)

    def numbers(
        self, name: str, length: int | None, low: float = -math.inf, high: float = math.inf
    ) -> tuple[float, ...]:
        """A list of numbers; None for any length but zero."""
        return numbers_of(self.get(name), self, name, length, low, high)

    def blocks(self, name: str) -> tuple[int, ...]:
        """A list of block numbers that differ."""
        value = self.get(name)
        if (
            not isinstance(value, list)
            or not value
            or not all(_is_integer(block) and 0 <= block < MOST_BLOCKS for block in value)
            or len(set(value)) != len(value)
        ):
            raise self.wrong(name, "a list of different block numbers")
        return tuple(value)

    def object(self, name: str) -> "Fields":
        """An object."""
        if name not in self._value:
            raise self.wrong(name, "an object")
        return Fields(self.get(name), f"{self.where}, {name}")

    def objects(self, name: str) -> list["Fields"]:
        """A list of objects, at least one."""
        value = self.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list with something in it")
        return [Fields(item, f"{self.where}, {name}[{i}]") for i, item in enumerate(value)]

    def wrong(self, name: str, expected: str) -> ResultError:
        """The error of a field that is missing or not as expected."""
        if name not in self._value:
            return ResultError(f"{self.where} has no {name!r}, {expected}; {_AGAIN}")
        got = shown(self.get(name), 40)
        return ResultError(f"{self.where}: {name!r} must be {expected}, got {got}; {_AGAIN}")


def numbers_of(
    value: Any,
    fields: Fields,
    name: str,
    length: int | None,
    low: float = -math.inf,
    high: float = math.inf,
) -> tuple[float, ...]:
    """A list of numbers found somewhere in the field `name` of `fields`."""
    size = "" if length is None else f"{length} "
    if (
        not isinstance(value, list)
        or not value
        or (length is not None and len(value) != length)
        or not all(_is_number(item) and low <= item <= high for item in value)
    ):
        raise fields.wrong(name, f"a list of {size}numbers" + _bounds(low, high))
    return tuple(float(item) for item in value)


def open_results(records: Sequence[dict[str, Any]], figure: str) -> list[Fields]:
    """The results of each record.

    Raises:
        ResultError: No record, or one of a kind that this figure does not read.
    """
    entry = FIGURES[figure]
    if not records:
        raise ResultError(f"the {figure} figure needs at least one record, got none")
    opened = []
    for number, record in enumerate(records, start=1):
        where = f"record {number} of {len(records)}"
        kind = Fields(record, where).get("kind")
        if not entry.reads(kind):
            others = [name for name, other in FIGURES.items() if other.reads(kind)]
            advice = f"; draw it with buddy plot {' or '.join(others)}" if others else ""
            raise ResultError(
                f"{where} is of kind {kind!r}, but the {figure} figure reads "
                f"{' or '.join(entry.kinds)}{advice}"
            )
        opened.append(Fields(record.get("results"), f"{where} ({kind}): results"))
    return opened


def same_num_blocks(counts: Sequence[int], figure: str) -> int:
    """The one number of blocks of all that is drawn.

    Raises:
        ResultError: They are of models of different depths.
    """
    found = sorted(set(counts))
    if len(found) != 1:
        raise ResultError(
            f"the {figure} figure draws one depth of model, but these records are of models with "
            f"{' and '.join(map(str, found))} blocks: draw a figure for each"
        )
    return found[0]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value in _DRAWN


def _bounds(low: float, high: float) -> str:
    if low == -math.inf and high == math.inf:
        return ""
    return f" of at least {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
