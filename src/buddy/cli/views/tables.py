"""Prints a table so that no number is broken: whole, or row by row where it is too wide."""

from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_UNLIMITED: Final = 1_000_000


def show_table(console: Console, table: Table) -> None:
    """Print a table; on a terminal that it does not fit, each row as a list of its cells.

    Only columns without `no_wrap` are made narrower, and those at spaces.
    """
    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(map(_width, _contents(column)))
    unlimited = console.options.update(max_width=_UNLIMITED)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic")
    first, *others = table.columns
    named = [(_header(column), list(column.cells)) for column in others if _header(column)]
    indent = max(cell_len(name) for name, _ in named)
    for row, cell in enumerate(first.cells):
        console.print(f"{_header(first)} {cell}".strip(), style="bold")
        for name, cells in named:
            if str(cells[row]):
                console.print(Text(f"  {name:<{indent}}  ").append(str(cells[row])))


def _contents(column: Column) -> list[str]:
    return [str(column.header), *map(str, column.cells)]


def _header(column: Column) -> str:
    return " ".join(str(column.header).split())


def _width(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)
