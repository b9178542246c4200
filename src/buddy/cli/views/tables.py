"""Prints a table so that no number is broken: whole, or row by row where it is too wide."""

from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

_UNLIMITED: Final = 1_000_000
_NAME_WIDTH: Final = 13
"""A long name is folded into so many columns, where that helps."""


def show_table(console: Console, table: Table) -> None:
    """Print a table, on a terminal as narrow as it must be.

    Columns without `no_wrap` are wrapped at spaces. Then columns without a header (bars) go, then
    names (`overflow="fold"`) are folded. Where the table still does not fit, each row is printed as
    a list of its cells. No cell of another column is ever broken.
    """
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(map(_width, _contents(column)))
    if not console.is_terminal:
        table.box = None
        _drop_bars(table)  # without colours they say nothing
    for narrow in (lambda _: None, _drop_bars, _fold_names):
        narrow(table)
        if _least_width(console, table) <= console.width:
            console.print(table)
            return
    _show_rows(console, table)


def plain_table(title: str | None = None) -> Table:
    """A table without lines, whose header is dim."""
    return Table(title=title, title_justify="left", box=None, header_style="dim", pad_edge=False)


def name_column(table: Table, header: str) -> None:
    """Add a column of names, which may be folded."""
    table.add_column(header, overflow="fold")


def _drop_bars(table: Table) -> None:
    table.columns = [column for column in table.columns if _header(column)]


def _fold_names(table: Table) -> None:
    for column in table.columns:
        if column.overflow == "fold":
            column.width = min(_NAME_WIDTH, max(map(_width, _contents(column))))


def _least_width(console: Console, table: Table) -> int:
    unlimited = console.options.update(max_width=_UNLIMITED)
    return Measurement.get(console, unlimited, table).minimum


def _show_rows(console: Console, table: Table) -> None:
    if table.title:
        console.print(table.title, style="italic")
    first, *others = table.columns
    indent = max(cell_len(_header(column)) for column in others)
    for row, cell in enumerate(first.cells):
        facts = [(_header(column), str(list(column.cells)[row])) for column in others]
        is_heading = not any(text for _, text in facts)
        console.print(str(cell) if is_heading else f"{_header(first)} {cell}", style="bold")
        for name, text in facts:
            if text:
                console.print(f"  {name:<{indent}}  {text}")


def _contents(column: Column) -> list[str]:
    return [str(column.header), *map(str, column.cells)]


def _header(column: Column) -> str:
    return " ".join(str(column.header).split())


def _width(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)
