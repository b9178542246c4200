"""Ranks and importance of blocks, as observations and indicators leave them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Annotated, Any, Final

from buddy.errors import ResultError, shown
from buddy.lab.plots.names import indicator_name, text_name
from buddy.lab.plots.read import parts
from buddy.settings import Range, Size

_TELLING: Final = ("model", "text", "protect", "windows", "tokens", "dtype")


_Table = Annotated[tuple[parts.Many[parts.NotNegative], ...], Size(1)]
"""Rows of equally many numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeries(parts.RecordPart):
    """Removal ranks by one indicator on one text; rank 0 goes first."""

    indicator: parts.Name
    text: parts.Name
    ranks: _Table
    """[inputs, blocks]."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        _check_table("ranks", self.ranks, len(self.ranks), len(self.ranks[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRanks(parts.RecordPart):
    """Mean removal ranks as the context grows."""

    indicator: parts.Name
    contexts: Annotated[tuple[Annotated[int, Range(1, 2**53)], ...], Size(2)]
    """Tokens, ascending."""
    ranks: _Table
    """[contexts, blocks]."""
    stderr: _Table
    """[contexts, blocks]."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        if sorted(set(self.contexts)) != list(self.contexts):
            raise ResultError(f"contexts must be ascending numbers, got {shown(self.contexts)}")
        for name in ("ranks", "stderr"):
            _check_table(name, getattr(self, name), len(self.contexts), len(self.ranks[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Importance(parts.RecordPart):
    """What one indicator, or one search, says of a model's blocks."""

    removal_order: Annotated[tuple[Annotated[int, Range(0, parts.MOST_BLOCKS - 1)], ...], Size(1)]
    """Least important first; blocks that are never removed are left out."""
    importance: parts.Many[parts.Drawn] | None = None
    """One a block, larger = more important; None for a search."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        if len(set(self.removal_order)) != len(self.removal_order):
            raise ResultError(
                f"removal_order must name different blocks, got {shown(self.removal_order)}"
            )


@dataclass(frozen=True, slots=True)
class _Model(parts.RecordPart):
    """The model that a record names."""

    num_blocks: parts.Blocks


def _check_table(name: str, table: Sequence[Sequence[float]], rows: int, columns: int) -> None:
    parts.check_length(name, table, rows)
    for place, row in enumerate(table):
        parts.check_length(f"{name}[{place}]", row, columns)


def read_rank_series(records: Sequence[dict[str, Any]]) -> dict[str, RankSeries]:
    """Every series of every `observe-ranks` record, by name.

    Raises:
        ResultError: A record of another kind, a field missing, ranks that do not fit together,
            or a series that is there twice.
    """
    series = [*chain.from_iterable(parts.read_items(records, "ranks", "series", RankSeries))]
    texts = {ranks.text for ranks in series}
    names = [_series_name(ranks, texts) for ranks in series]
    _refuse_twice(names, "ranks")
    parts.same_num_blocks([len(ranks.ranks[0]) for ranks in series], "ranks")
    return dict(zip(names, series, strict=True))


def read_context_ranks(records: Sequence[dict[str, Any]]) -> ContextRanks:
    """The one `observe-context` record.

    Raises:
        ResultError: Several records, one of another kind, or fields that do not fit together.
    """
    results, *others = parts.read_results(records, "context", ContextRanks)
    if others:
        raise ResultError(
            f"the context figure draws one record, got {len(records)}: draw a figure for each"
        )
    return results


def read_importance(records: Sequence[dict[str, Any]]) -> tuple[dict[str, Importance], int]:
    """Every importance record by name, and the model's number of blocks.

    The number is that of the model that a record names, or of its scores. Where all are searches
    that name none, they are taken to have left the last block out.

    Raises:
        ResultError: A record of another kind, a field missing, models of different depths, or
            two records that nothing tells apart.
    """
    results = parts.read_results(records, "importance", Importance)
    names = _names(records)
    depths = [len(indicator.importance) for indicator in results if indicator.importance]
    depths += [
        parts.read_part(_Model, record["model"], f"record {number}, model").num_blocks
        for number, record in enumerate(records, start=1)
        if record.get("model")
    ]
    highest = max(max(indicator.removal_order) for indicator in results)
    num_blocks = parts.same_num_blocks(depths or [highest + 2], "importance")
    if highest >= num_blocks:
        raise ResultError(
            f"a removal order names block {highest}, but other records are of a model with "
            f"{num_blocks} blocks: draw a figure for each model"
        )
    return dict(zip(names, results, strict=True)), num_blocks


def _series_name(series: RankSeries, texts: set[str]) -> str:
    twins = [text for text in texts if text_name(text) == text_name(series.text)]
    is_alone = len(twins) == 1
    shown_text = text_name(series.text) if is_alone else str(PurePath(series.text).with_suffix(""))
    return f"{indicator_name(series.indicator)}, {shown_text}"


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Indicators' names; where two are the same, with what their settings differ in."""
    kinds = [str(record["kind"]).removeprefix("importance-") for record in records]
    names = []
    for record, kind in zip(records, kinds, strict=True):
        twins = [r for r, k in zip(records, kinds, strict=True) if k == kind]
        differ = [key for key in _TELLING if len({str(_setting(twin, key)) for twin in twins}) > 1]
        differences = [_told(key, _setting(record, key)) for key in differ]
        names.append(", ".join([indicator_name(kind), *differences]))
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
