"""Bars laid end to end, a row each: what `buddy reproduce` writes of shares and hours."""

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from buddy.errors import ResultError
from buddy.lab.plots.names import text_name
from buddy.lab.plots.read.parts import (
    Many,
    Name,
    NotNegative,
    RecordPart,
    check_length,
    read_results,
)
from buddy.lab.plots.style import Page, Records, in_paper_style, legend_below
from buddy.settings import Size

_ROW_INCHES: Final = 0.16
_RAMP: Final = LinearSegmentedColormap.from_list("ramp", ["#D6EAF8", "#4C9CCB", "#00324F"])
"""Lighter to darker, because parts have an order."""


@dataclass(frozen=True, slots=True)
class _Row(RecordPart):
    """A row of bars."""

    label: Name
    values: tuple[NotNegative, ...]


@dataclass(frozen=True, slots=True)
class _Bars(RecordPart):
    """All rows, and what their parts are called."""

    x_label: Name
    parts: Annotated[tuple[Name, ...], Size(1, 12)]
    rows: Many[_Row]

    def __post_init__(self) -> None:
        RecordPart.__post_init__(self)
        for place, row in enumerate(self.rows):
            check_length(f"rows[{place}]: values", row.values, len(self.parts))


@dataclass(frozen=True, slots=True)
class _Results:
    """Results with bars."""

    bars: _Bars


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw a row for each label, its parts from left to right.

    Records: one, of kind `reproduce-*`.
    """
    bars = read_results(records, "bars", _Results)[0].bars
    names, rows = bars.parts, bars.rows
    values = np.array([row.values for row in rows])
    if not values.sum() > 0:
        raise ResultError("bars: all values are 0, and there is nothing to draw")
    figure = page.figure(len(rows) * _ROW_INCHES + 0.55)
    axes = figure.subplots()
    labels = [text_name(row.label) for row in rows]
    colours = _RAMP(np.linspace(0.0, 1.0, len(names)))
    starts = np.cumsum(values, axis=1) - values
    for place in range(len(names)):
        axes.barh(
            range(len(rows)),
            values[:, place],
            left=starts[:, place],
            height=0.72,
            color=colours[place],
        )
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(bars.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=True, axis="x")
    handles = [Patch(facecolor=colours[place]) for place in range(len(names))]
    legend_below(figure, handles, names, handlelength=1.2)
    return figure
