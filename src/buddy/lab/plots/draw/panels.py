"""Panels of lines, the paper's beside ours: what `buddy reproduce` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from buddy.errors import ResultError
from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.read.fields import Fields, open_results
from buddy.lab.plots.style import GREY, MEDIUM, fold, in_paper_style, legend_below, look, new_figure

_PANEL_INCHES: Final = 1.7
_PAPER: Final[dict[str, Any]] = {
    "linestyle": (0, (2, 1.5)),
    "linewidth": 0.8,
    "markerfacecolor": "white",
}
_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class _Line:
    """One line, and whether the paper reports it."""

    label: str
    paper: bool
    x: tuple[float, ...]
    y: tuple[float, ...]
    stderr: tuple[float, ...] | None


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw two panels a row; a label has one colour in all of them.

    The paper's lines are dashed and their markers are hollow. Bars are one standard error.

    Args:
        records: One, of kind `reproduce-*`.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    panels = open_results(records, "panels")[0].objects("panels")
    lines = [_lines(one) for one in panels]
    labels = list(dict.fromkeys(line.label for own in lines for line in own))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(width, rows * _PANEL_INCHES + 0.1, title)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, one, own in zip(grid, panels, lines, strict=False):
        for line in own:
            _draw_line(axes, line, labels.index(line.label))
        room = width / columns - 0.4
        axes.set_title(fold(one.text("title"), room, MEDIUM))
        axes.set_xlabel(fold(one.text("x_label"), room, MEDIUM))
        axes.set_ylabel(fold(one.text("y_label"), _PANEL_INCHES - 0.3, MEDIUM))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        counts = all(value == int(value) for line in own for value in line.y)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=counts))
        if counts:
            axes.set_ylim(bottom=0)
        axes.grid(visible=True)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    legend_below(figure, *_legend(labels, lines))
    return figure


def _draw_line(axes: Axes, line: _Line, place: int) -> None:
    style = {**look(place), "linestyle": "solid"}
    if line.paper:
        style |= {**_PAPER, "markeredgecolor": style["color"]}
    axes.errorbar(line.x, line.y, yerr=line.stderr, elinewidth=0.7, capsize=1.4, **style)


def _legend(
    labels: Sequence[str], panels: Sequence[Sequence[_Line]]
) -> tuple[list[Artist], list[str]]:
    """A handle a label; where both are drawn, how the paper's differ from ours."""
    every = [line for own in panels for line in own]
    handles: list[Artist] = []
    for place, label in enumerate(labels):
        style = {**look(place), "linestyle": "solid"}
        if all(line.paper for line in every if line.label == label):
            style |= {**_PAPER, "markeredgecolor": style["color"]}
        handles.append(Line2D([], [], **style))
    names = list(labels)
    if len({line.paper for line in every}) > 1:
        handles += [Line2D([], [], color=GREY), Line2D([], [], color=GREY, **_PAPER)]
        names += ["measured here", "reported by the paper"]
    return handles, names


def _lines(panel: Fields) -> list[_Line]:
    found = []
    for one in panel.objects("lines"):
        if not isinstance(one.get("paper"), bool):
            raise ResultError(f"{one.where}: 'paper' must be true or false")
        x = one.numbers("x", None)
        spread = None if one.get("stderr") is None else one.numbers("stderr", len(x), 0.0)
        found.append(
            _Line(one.text("label"), one.get("paper"), x, one.numbers("y", len(x)), spread)
        )
    return found
