"""One value against executed blocks, a line a policy: what two figures share."""

from collections.abc import Sequence
from typing import Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from buddy.lab.plots.read.points import Point, dense_values, series_of
from buddy.lab.plots.style import GREY, Page, block_ticks, legend_below, look

_HEIGHT: Final = 1.9


def draw_depth_lines(points: Sequence[Point], page: Page, *, scale: float, y_label: str) -> Figure:
    """Draw points of one task and metric.

    Policy `full` is no line: it is the level that the others are held against.

    Args:
        points: At least one.
        page: Its room.
        scale: What the axis shows of a value of 1.
        y_label: Of the axis.
    """
    figure = page.figure(_HEIGHT)
    axes = figure.subplots()
    handles: list[Artist] = []
    labels: list[str] = []
    lines = series_of([point for point in points if point.policy != "full"])
    for index, (label, line) in enumerate(lines.items()):
        handles.append(_line(axes, line, scale, index))
        labels.append(label)
    levels = [
        axes.axhline(scale * dense, color=GREY, linestyle=(0, (5, 2)), linewidth=0.8, zorder=1)
        for dense in dense_values(points)
    ]
    handles += levels[:1]
    labels += [f"dense ({points[0].num_blocks} blocks)"][: len(levels)]
    axes.grid(axis="y")
    axes.set_xlabel("Executed blocks")
    axes.set_ylabel(y_label)
    block_ticks(axes, [point.blocks for line in lines.values() for point in line])
    legend_below(figure, handles, labels)
    return figure


def _line(axes: Axes, line: Sequence[Point], scale: float, index: int) -> Artist:
    """A line with bars of one standard error, where there is one."""
    spread = [scale * (point.stderr or 0.0) for point in line]
    drawn, _, _ = axes.errorbar(
        [point.blocks for point in line],
        [scale * point.value for point in line],
        yerr=spread if any(spread) else None,
        elinewidth=0.7,
        capsize=1.4,
        capthick=0.7,
        **look(index),
    )
    handle: Artist = drawn
    return handle
