"""Ranks and importance of blocks, as observations and indicators leave them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from buddy.errors import ResultError
from buddy.lab.plots.names import indicator_name, text_name
from buddy.lab.plots.read.fields import (
    MOST_BLOCKS,
    Fields,
    numbers_of,
    open_results,
    same_num_blocks,
)

_TELLING: Final = ("model", "text", "protect", "windows", "tokens", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeries:
    """Removal ranks by one indicator on one text; rank 0 goes first."""

    name: str
    ranks: tuple[tuple[float, ...], ...]
    """[inputs, blocks]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRanks:
    """Mean removal ranks as the context grows."""

    indicator: str
    contexts: tuple[int, ...]
    """Tokens, ascending; at least two."""
    ranks: tuple[tuple[float, ...], ...]
    """[contexts, blocks]."""
    stderr: tuple[tuple[float, ...], ...]
    """[contexts, blocks]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance:
    """What one indicator, or one search, says of a model's blocks."""

    name: str
    scores: tuple[float, ...] | None
    """One a block, larger = more important; None for a search."""
    removal_order: tuple[int, ...]
    """Least important first; blocks that are never removed are left out."""


def read_rank_series(records: Sequence[dict[str, Any]]) -> list[RankSeries]:
    """Every series of every `observe-ranks` record.

    Raises:
        ResultError: A record of another kind, a field missing, ranks that do not fit together,
            or a series that is there twice.
    """
    opened = open_results(records, "ranks")
    items = [item for results in opened for item in results.objects("series")]
    texts = {item.text("text") for item in items}
    series = [_series(item, texts) for item in items]
    _refuse_twice([one.name for one in series], "ranks")
    same_num_blocks([len(one.ranks[0]) for one in series], "ranks")
    return series


def read_context_ranks(records: Sequence[dict[str, Any]]) -> ContextRanks:
    """The one `observe-context` record.

    Raises:
        ResultError: Several records, one of another kind, or fields that do not fit together.
    """
    results, *others = open_results(records, "context")
    if others:
        raise ResultError(
            f"the context figure draws one record, got {len(records)}: draw a figure for each"
        )
    lengths = results.numbers("contexts", None, 1.0)
    if sorted(set(lengths)) != list(lengths) or len(lengths) == 1:
        raise results.wrong("contexts", "a list of two or more ascending numbers of tokens")
    ranks = _table(results, "ranks", len(lengths))
    return ContextRanks(
        indicator=results.text("indicator"),
        contexts=tuple(int(length) for length in lengths),
        ranks=ranks,
        stderr=_table(results, "stderr", len(lengths), len(ranks[0])),
    )


def read_importance(records: Sequence[dict[str, Any]]) -> tuple[list[Importance], int]:
    """Every importance record, and the model's number of blocks.

    The number is that of the model that a record names, or of its scores. Where all are searches
    that name none, they are taken to have left the last block out.

    Raises:
        ResultError: A record of another kind, a field missing, models of different depths, or
            two records that nothing tells apart.
    """
    opened = open_results(records, "importance")
    names = _names(records)
    found = [_importance(*pair) for pair in zip(opened, names, strict=True)]
    depths = [len(one.scores) for one in found if one.scores]
    depths += [
        Fields(record["model"], f"record {number}, model").integer("num_blocks", 1, MOST_BLOCKS)
        for number, record in enumerate(records, start=1)
        if record.get("model")
    ]
    highest = max(max(one.removal_order) for one in found)
    num_blocks = same_num_blocks(depths or [highest + 2], "importance")
    if highest >= num_blocks:
        raise ResultError(
            f"a removal order names block {highest}, but other records are of a model with "
            f"{num_blocks} blocks: draw a figure for each model"
        )
    return found, num_blocks


def _series(item: Fields, texts: set[str]) -> RankSeries:
    text = item.text("text")
    twins = [one for one in texts if text_name(one) == text_name(text)]
    told = text_name(text) if len(twins) == 1 else str(PurePath(text).with_suffix(""))
    name = f"{indicator_name(item.text('indicator'))}, {told}"
    return RankSeries(name=name, ranks=_table(item, "ranks", None))


def _importance(results: Fields, name: str) -> Importance:
    scores = results.get("importance")
    return Importance(
        name=name,
        scores=None if scores is None else results.numbers("importance", None),
        removal_order=results.blocks("removal_order"),
    )


def _table(
    fields: Fields, name: str, rows: int | None, columns: int | None = None
) -> tuple[tuple[float, ...], ...]:
    """Rows of equally many numbers, none below 0."""
    value = fields.get(name)
    if not isinstance(value, list) or not value or (rows is not None and len(value) != rows):
        raise fields.wrong(name, "a list of " + (f"{rows} lists" if rows else "lists"))
    first = numbers_of(value[0], fields, name, columns, 0.0)
    return (first, *(numbers_of(row, fields, name, len(first), 0.0) for row in value[1:]))


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Indicators' names; where two are the same, with what their settings differ in."""
    kinds = [str(record["kind"]).removeprefix("importance-") for record in records]
    names = []
    for record, kind in zip(records, kinds, strict=True):
        twins = [r for r, k in zip(records, kinds, strict=True) if k == kind]
        differ = [key for key in _TELLING if len({str(_setting(twin, key)) for twin in twins}) > 1]
        told = [_told(key, _setting(record, key)) for key in differ]
        names.append(", ".join([indicator_name(kind), *told]))
    _refuse_twice(names, "importance")
    return names


def _setting(record: dict[str, Any], key: str) -> Any:
    config = record.get("config")
    return config.get(key) if isinstance(config, dict) else None


def _told(key: str, value: Any) -> str:
    if key in ("model", "text"):
        return text_name(PurePath(str(value)).name)
    return f"{key} {value}"


def _refuse_twice(names: Sequence[str], figure: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ResultError(
                f"the {figure} figure was given {name!r} twice, and nothing tells the two apart: "
                "leave out one of the records"
            )
