"""The results of records, each read into a dataclass by the validator that reads recipes."""

from collections.abc import Sequence
from dataclasses import make_dataclass
from typing import Annotated, Any, Final, TypeVar

from buddy.errors import ResultError
from buddy.lab.plots.figures import FIGURES
from buddy.settings import Range, Size, build, check_ranges

MOST_BLOCKS: Final = 10_000
"""Deeper models are taken for damage: a figure has a column for each block."""
_FAR: Final = 1e306
"""Axes need room beyond what they show."""
Name = Annotated[str, Size(1)]
Blocks = Annotated[int, Range(1, MOST_BLOCKS)]
Drawn = Annotated[float, Range(-_FAR, _FAR)]
NotNegative = Annotated[float, Range(0, _FAR)]
Positive = Annotated[float, Range(above=0, high=_FAR)]
Share = Annotated[float, Range(0, 1)]
Results = TypeVar("Results")
Item = TypeVar("Item")
Many = Annotated[tuple[Item, ...], Size(1)]


class RecordPart:
    """A base of dataclasses that are read from records: ranges and lengths are checked."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_ranges(self, ResultError)


def read_results(
    records: Sequence[dict[str, Any]], figure: str, kind: type[Results]
) -> list[Results]:
    """The results of each record.

    Args:
        records: As `buddy.records.read_record` gives them.
        figure: That they are drawn in.
        kind: A dataclass with the results that the figure draws; a record may have more.

    Raises:
        ResultError: No record, one of a kind that this figure does not read, or a field that is
            missing or not as expected.
    """
    if not records:
        raise ResultError(f"the {figure} figure needs at least one record, got none")
    opened = []
    for number, record in enumerate(records, start=1):
        where = f"record {number} of {len(records)}"
        check_kind(record, figure, where)
        opened.append(
            read_part(kind, record.get("results"), f"{where} ({record['kind']}): results")
        )
    return opened


def read_items(
    records: Sequence[dict[str, Any]], figure: str, name: str, kind: type[Item]
) -> list[tuple[Item, ...]]:
    """One list of the results of each record, as `read_results`; it has an item at least."""
    items: Any = Many[kind]  # type: ignore[valid-type]  # a class that is known at run time alone
    only: type[Any] = make_dataclass("Results", [(name, items)], bases=(RecordPart,), frozen=True)
    return [getattr(results, name) for results in read_results(records, figure, only)]


def read_part(kind: type[Results], value: Any, where: str) -> Results:
    """A part of a record as a dataclass.

    Raises:
        ResultError: A field is missing or not as expected.
    """
    try:
        return build(kind, value, where, ResultError, others=True)
    except ResultError as error:
        raise ResultError(
            f"{error}; make the record again with the command that it names"
        ) from error


def check_kind(record: dict[str, Any], figure: str, where: str) -> None:
    """Refuse a record that a figure does not read.

    Raises:
        ResultError: It is of another kind.
    """
    kind, entry = record.get("kind"), FIGURES[figure]
    if entry.reads(kind):
        return
    others = [name for name, other in FIGURES.items() if other.reads(kind)]
    advice = f"; draw it with buddy plot {' or '.join(others)}" if others else ""
    raise ResultError(
        f"{where} is of kind {kind!r}, but the {figure} figure reads "
        f"{' or '.join(entry.kinds)}{advice}"
    )


def check_length(name: str, values: Sequence[Any], length: int) -> None:
    """Refuse a list that has not as many items as another one; for `__post_init__`.

    Raises:
        ResultError: It is longer or shorter.
    """
    if len(values) != length:
        raise ResultError(f"{name} must be {length} long, got {len(values)}")


def check_depth(name: str, blocks: int | None, num_blocks: int) -> None:
    """Refuse more blocks than the model has; for `__post_init__`.

    Raises:
        ResultError: There are more.
    """
    if blocks is not None and blocks > num_blocks:
        raise ResultError(f"{name} must be at most {num_blocks}, got {blocks}")


def same_num_blocks(counts: Sequence[int], figure: str) -> int:
    """The one number of blocks of all that is drawn.

    Raises:
        ResultError: They are of models of different depths.
    """
    depths = sorted(set(counts))
    if len(depths) != 1:
        raise ResultError(
            f"the {figure} figure draws one depth of model, but these records are of models with "
            f"{' and '.join(map(str, depths))} blocks: draw a figure for each"
        )
    return depths[0]
