"""Goodput against offered load, and the depth that answers had, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.read.fields import MOST_BLOCKS, Fields, open_results
from buddy.lab.plots.style import (
    GREY,
    MEDIUM,
    fold,
    in_paper_style,
    legend_below,
    look,
    new_figure,
    not_measured,
)

_HEIGHT: Final = 1.7


@dataclass(frozen=True, slots=True)
class _Point:
    """What one rate gave; blocks are None where the server named none."""

    offered: float
    goodput: float
    blocks: float | None


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw a line a record; dashed is a server that serves all that it is offered.

    Args:
        records: Of kind `serving-load`.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    results = open_results(records, "load")
    lines: dict[str, list[_Point]] = {}
    for place, (record, opened) in enumerate(zip(records, results, strict=True)):
        config = Fields(record.get("config"), f"record {place + 1}: config")
        points = [_point(one) for one in opened.objects("points")]
        lines.setdefault(config.text("label"), []).extend(points)
    figure = new_figure(width, _HEIGHT, title)
    goodput, depth = figure.subplots(1, 2)
    handles: list[Artist] = []
    for index, line in enumerate(lines.values()):
        line.sort(key=lambda one: one.offered)
        (handle,) = goodput.plot(
            [one.offered for one in line], [one.goodput for one in line], **look(index)
        )
        handles.append(handle)
        fed = [one for one in line if one.blocks is not None]
        depth.plot([one.offered for one in fed], [one.blocks or 0.0 for one in fed], **look(index))
    most = max(one.offered for line in lines.values() for one in line)
    (ideal,) = goodput.plot(
        [0, most], [0, most], color=GREY, linestyle=(0, (4, 2)), linewidth=0.8, zorder=1
    )
    if not any(one.blocks is not None for line in lines.values() for one in line):
        not_measured(depth)
    room = width / 2 - 0.4
    for axes, label in ((goodput, "Good answers/s"), (depth, "Blocks per token")):
        axes.set_xlabel(fold("Offered requests/s", room, MEDIUM))
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.grid(visible=True)
    legend_below(figure, [*handles, ideal], [*lines, "all that is offered"])
    return figure


def _point(fields: Fields) -> _Point:
    blocks = fields.get("blocks_per_token")
    if blocks is not None:
        blocks = fields.number("blocks_per_token", 0.0, float(MOST_BLOCKS))
    offered = fields.positive("offered_rps")
    return _Point(offered, fields.number("goodput_rps", 0.0), blocks)
