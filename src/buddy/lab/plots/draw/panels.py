"""Panels of lines, the paper's beside ours: what `buddy reproduce` writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots.read.records import (
    Drawn,
    Many,
    Name,
    NotNegative,
    RecordPart,
    check_length,
    read_items,
)
from buddy.lab.plots.style import (
    GREY,
    MEDIUM,
    Page,
    Records,
    fold,
    in_paper_style,
    legend_below,
    look,
)

_PANEL_INCHES: Final = 1.7
_PAPER: Final[dict[str, Any]] = {
    "linestyle": (0, (2, 1.5)),
    "linewidth": 0.8,
    "markerfacecolor": "white",
}
_COLUMNS: Final = 2


@dataclass(frozen=True, slots=True)
class _Line(RecordPart):
    """One line, and whether the paper reports it."""

    label: Name
    paper: bool
    x: Many[Drawn]
    y: tuple[Drawn, ...]
    stderr: tuple[NotNegative, ...] | None = None

    def __post_init__(self) -> None:
        RecordPart.__post_init__(self)
        check_length("y", self.y, len(self.x))
        check_length("stderr", self.y if self.stderr is None else self.stderr, len(self.x))


@dataclass(frozen=True, slots=True)
class _Panel(RecordPart):
    """Axes with lines."""

    title: Name
    x_label: Name
    y_label: Name
    lines: Many[_Line]


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw two panels a row; a label has one colour in all of them.

    The paper's lines are dashed and their markers are hollow. Bars are one standard error.

    Args:
        records: One, of kind `reproduce-*`.
        page: Its room.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    panels = read_items(records, "panels", "panels", _Panel)[0]
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
        axes.set_title(fold(panel.title, room, MEDIUM))
        axes.set_xlabel(fold(panel.x_label, room, MEDIUM))
        axes.set_ylabel(fold(panel.y_label, _PANEL_INCHES - 0.3, MEDIUM))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        counts = all(value == int(value) for line in panel.lines for value in line.y)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=counts))
        if counts:
            axes.set_ylim(bottom=0)
        axes.grid(visible=True)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    legend_below(figure, *_legend(labels, every))
    return figure


def _draw_line(axes: Axes, line: _Line, place: int) -> None:
    style = {**look(place), "linestyle": "solid"}
    if line.paper:
        style |= {**_PAPER, "markeredgecolor": style["color"]}
    axes.errorbar(line.x, line.y, yerr=line.stderr, elinewidth=0.7, capsize=1.4, **style)


def _legend(labels: Sequence[str], every: Sequence[_Line]) -> tuple[list[Artist], list[str]]:
    """A handle a label; where both are drawn, how the paper's differ from ours."""
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
