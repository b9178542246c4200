"""Panels of lines, the paper's beside ours: what `buddy reproduce` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots import style
from buddy.lab.plots.read import parts

_PANEL_INCHES: Final = 1.7
_PAPER: Final[dict[str, Any]] = {
    "linestyle": (0, (2, 1.5)),
    "linewidth": 0.8,
    "markerfacecolor": "white",
}
_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class _Line(parts.RecordPart):
    """One line, and whether the paper reports it."""

    label: parts.Name
    paper: bool
    x: parts.Many[parts.Drawn]
    y: tuple[parts.Drawn, ...]
    stderr: tuple[parts.NotNegative, ...] | None = None

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        parts.check_length("y", self.y, len(self.x))
        parts.check_length("stderr", self.y if self.stderr is None else self.stderr, len(self.x))


@dataclass(frozen=True, slots=True)
class _Panel(parts.RecordPart):
    """Axes with lines."""

    title: parts.Name
    x_label: parts.Name
    y_label: parts.Name
    lines: parts.Many[_Line]


@style.in_paper_style
def draw(records: style.Records, page: style.Page) -> Figure:
    """Draw two panels a row; a label has one colour in all of them.

    The paper's lines are dashed and their markers are hollow. Bars are one standard error.

    Records: one, of kind `reproduce-*`.
    """
    panels = parts.read_items(records, "panels", "panels", _Panel)[0]
    every = [line for panel in panels for line in panel.lines]
    labels = list(dict.fromkeys(line.label for line in every))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = page.figure(rows * _PANEL_INCHES + 0.1)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        for line in panel.lines:
            _draw_line(axes, line, labels.index(line.label))
        room = page.width / columns - 0.4
        axes.set_title(style.fold(panel.title, room, style.MEDIUM))
        axes.set_xlabel(style.fold(panel.x_label, room, style.MEDIUM))
        axes.set_ylabel(style.fold(panel.y_label, _PANEL_INCHES - 0.3, style.MEDIUM))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        counts = all(value == int(value) for line in panel.lines for value in line.y)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=counts))
        if counts:
            axes.set_ylim(bottom=0)
        axes.grid(visible=True)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    style.legend_below(figure, *_legend(labels, every))
    return figure


def _draw_line(axes: Axes, line: _Line, place: int) -> None:
    looks = {**style.look(place), "linestyle": "solid"}
    if line.paper:
        looks |= {**_PAPER, "markeredgecolor": looks["color"]}
    axes.errorbar(line.x, line.y, yerr=line.stderr, elinewidth=0.7, capsize=1.4, **looks)


def _legend(labels: Sequence[str], every: Sequence[_Line]) -> tuple[list[Artist], list[str]]:
    """A handle a label; where both are drawn, how the paper's differ from ours."""
    handles: list[Artist] = []
    for place, label in enumerate(labels):
        looks = {**style.look(place), "linestyle": "solid"}
        if all(line.paper for line in every if line.label == label):
            looks |= {**_PAPER, "markeredgecolor": looks["color"]}
        handles.append(Line2D([], [], **looks))
    names = list(labels)
    if len({line.paper for line in every}) > 1:
        handles += [Line2D([], [], color=style.GREY), Line2D([], [], color=style.GREY, **_PAPER)]
        names += ["measured here", "reported by the paper"]
    return handles, names
