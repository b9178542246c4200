"""What `buddy load-test` shows at the end: a row for each rate."""

from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from buddy.cli.views.tables import show_table

_COLUMNS: Final = (
    ("offered\n/s", "offered_rps", "{:.2f}"),
    ("served\n/s", "served_rps", "{:.2f}"),
    ("good\n/s", "goodput_rps", "{:.2f}"),
    ("ttft p50\nms", "ttft_ms_p50", "{:.0f}"),
    ("ttft p95\nms", "ttft_ms_p95", "{:.0f}"),
    ("ttft p99\nms", "ttft_ms_p99", "{:.0f}"),
    ("itl p50\nms", "itl_ms_p50", "{:.1f}"),
    ("itl p95\nms", "itl_ms_p95", "{:.1f}"),
    ("itl p99\nms", "itl_ms_p99", "{:.1f}"),
    ("429", "refused", "{}"),
    ("failed", "failed", "{}"),
    ("blocks\n/token", "blocks_per_token", "{:.1f}"),
)


def show_load(console: Console, points: Sequence[dict[str, Any]]) -> None:
    """Print one line for each rate."""
    table = Table(box=box.SIMPLE_HEAD)
    for header, _, _ in _COLUMNS:
        table.add_column(header, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            *(
                "-" if point[name] is None else form.format(point[name])
                for _, name, form in _COLUMNS
            )
        )
    show_table(console, table)
