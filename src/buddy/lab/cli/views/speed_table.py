"""What `buddy bench` shows at the end: speed by budget, and where the time goes."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from buddy.cli.views.tables import name_column, show_table

_PIECES: Final = {
    "blocks": "green",
    "router": "magenta",
    "gather_scatter": "yellow",
    "kv_fill": "blue",
    "head": "cyan",
    "host": "bright_black",
}
_BESIDE_BAR: Final = 70
"""Columns of the terminal that names and figures take."""


class Row(NamedTuple):
    """The two cells of one condition, and what it is called."""

    name: str
    prefill: dict[str, Any]
    decode: dict[str, Any]

    @property
    def depth(self) -> str:
        """Blocks that ran, of how many; of the prompt and after it, where they differ."""
        blocks = dict.fromkeys([self.prefill["blocks"], self.decode["blocks"]])
        return f"{'+'.join(map(str, blocks))}/{self.prefill['num_blocks']}"


def show_speed(console: Console, results: dict[str, Any], engine: str) -> None:
    """Print both tables, and who ran decode steps."""
    names = [series["name"] for series in results["rounds"]]
    cells = results["cells"]
    rows = [Row(*row) for row in zip(names, cells[::2], cells[1::2], strict=True)]
    show_table(console, speed_table(rows))
    bar_width = min(40, max(10, console.width - _BESIDE_BAR))
    show_table(console, breakdown_table(rows, bar_width))
    peak = results["peak_memory_bytes"]
    memory = "" if peak is None else f" · peak memory {peak / 1e6:,.0f} MB"
    console.print(f"decode: {engine}{memory}", style="dim", markup=False)


def speed_table(rows: Sequence[Row]) -> Table:
    """Speeds, speed-ups, and what part of the speed-up that skipping could give at most."""
    cell = rows[0].prefill
    table = _table(f"Speed, batch {cell['batch']}, context {cell['context']}")
    for phase in ("prefill", "decode"):
        table.add_column(f"{phase}\ntok/s", justify="right", style="bold", no_wrap=True)
        for name in ("x\nfull", "x\nhf", "of\nideal"):
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, row.depth, *_figures(row.prefill), *_figures(row.decode))
    return table


def _figures(cell: dict[str, Any]) -> list[str]:
    per_s, over_hf = cell["tokens_per_s"], cell["speedup_transformers"]
    return [
        f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.1f}",
        f"{cell['speedup_own_dense']:.2f}",
        "" if over_hf is None else f"{over_hf:.2f}",
        ""
        if cell["shares"] is None
        else f"{cell['speedup_own_dense'] / cell['ideal_speedup']:.0%}",
    ]


def breakdown_table(rows: Sequence[Row], bar_width: int) -> Table:
    """Each piece's share of the time, in per cent and as a bar."""
    table = _table("Where the time goes, %")
    for piece, colour in _PIECES.items():
        name = piece.replace("_", "\n", 1)
        table.add_column(name, justify="right", no_wrap=True, header_style=f"bold {colour}")
    table.add_column("", no_wrap=True)
    for phase in ("prefill", "decode"):
        table.add_row(Text(phase, style="bold italic"))
        for row in rows:
            shares = getattr(row, phase)["shares"]
            if shares is not None:
                parts = [f"{100 * shares[piece]:.1f}" for piece in _PIECES]
                table.add_row(row.name, row.depth, *parts, _bar(shares, bar_width))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    name_column(table, "policy")
    table.add_column("depth", justify="right", no_wrap=True)
    return table


def _bar(shares: dict[str, float], width: int) -> Text:
    """One line in the pieces' colours, as long for every row."""
    bar, passed, drawn = Text(), 0.0, 0
    for piece, colour in _PIECES.items():
        passed += shares[piece]
        end = round(width * passed)
        bar.append("\u2588" * (end - drawn), style=colour)
        drawn = end
    return bar
