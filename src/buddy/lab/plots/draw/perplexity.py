"""Perplexity against executed blocks."""

import math
from collections.abc import Sequence
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from buddy.errors import ResultError
from buddy.lab.plots.draw.depth_lines import draw_depth_lines
from buddy.lab.plots.names import metric_name, sentence, text_name
from buddy.lab.plots.read.points import Point, narrowed, read_points
from buddy.lab.plots.style import Page, Records, in_paper_style

_ENOUGH: Final = 3
_TOO_MANY: Final = 7
_LARGEST_PREFIX: Final = 1e15
_DECADES: Final = 307.0
"""All that a float has."""


@in_paper_style
def draw(
    records: Records, page: Page, task: str | None = None, metric: str | None = None
) -> Figure:
    """Draw a line a policy on a log axis, with bars of one standard error.

    Args:
        records: Of evaluations of perplexity; their points are merged.
        page: Its room.
        task: The text; by default the only one there is.
        metric: `perplexity` by default.
    """
    points = narrowed(read_points(records, "perplexity"), "metric", metric, "perplexity")
    points = narrowed(points, "task", task, "average")
    task, metric = points[0].task, points[0].metric
    for point in points:
        if point.value <= 0:
            raise ResultError(
                f"a log axis takes values above 0, but {point.label!r} has {metric} "
                f"{point.value:g} on {task}: choose another --metric"
            )
    label = f"{text_name(task)} {metric_name(metric)}"
    figure = draw_depth_lines(points, page, scale=1.0, y_label=sentence(label))
    _log_axis(figure.axes[0], points)
    return figure


def _log_axis(axes: Axes, points: Sequence[Point]) -> None:
    """A log y axis with a few round numbers on it, however many decades it spans."""
    low, high = _limits(points)
    axes.set_ylim(low, high)
    axes.set_yscale("log", nonpositive="clip")
    axes.yaxis.set_major_locator(FixedLocator(round_numbers(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    axes.yaxis.set_minor_locator(NullLocator())


def _limits(points: Sequence[Point]) -> tuple[float, float]:
    """Room for every point and its bar; matplotlib's own limits can be above all floats."""
    spreads = [(point.value, point.stderr or 0.0) for point in points]
    low = math.log10(min(v - e if v > e else v for v, e in spreads))
    high = min(math.log10(max(v + e for v, e in spreads)), _DECADES)
    room = max(0.05 * (high - low), 0.02)
    return 10 ** (low - room), 10 ** min(high + room, _DECADES)


def _short(value: float, position: int | None = None) -> str:
    """12.5, 30k or 1e+80: a broken model's perplexity has no end."""
    return EngFormatter(sep="")(value) if 1 <= value < _LARGEST_PREFIX else f"{value:.3g}"


def round_numbers(low: float, high: float) -> list[float]:
    """Three to seven round numbers from `low` to `high`, as even on a log axis as can be."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= _ENOUGH:
            return ticks[:: math.ceil(len(ticks) / _TOO_MANY)]
    return [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
