"""Bars laid end to end, a row each: what `buddy reproduce` writes of shares and hours."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from buddy.errors import ResultError
from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.names import text_name
from buddy.lab.plots.read.fields import open_results
from buddy.lab.plots.style import in_paper_style, legend_below, new_figure

_ROW_INCHES: Final = 0.16
_MOST_PARTS: Final = 12
_RAMP: Final = LinearSegmentedColormap.from_list("ramp", ["#D6EAF8", "#4C9CCB", "#00324F"])
"""Lighter to darker, because parts have an order."""


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw a row for each label, its parts from left to right.

    Args:
        records: One, of kind `reproduce-*`.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    found = open_results(records, "bars")[0]
    bars = found.object("bars")
    parts = bars.get("parts")
    if not isinstance(parts, list) or not 0 < len(parts) <= _MOST_PARTS:
        raise bars.wrong("parts", f"a list of 1 to {_MOST_PARTS} names")
    rows = bars.objects("rows")
    values = np.array([row.numbers("values", len(parts), 0.0) for row in rows])
    if not values.sum() > 0:
        raise ResultError(f"{bars.where}: all values are 0, and there is nothing to draw")
    figure = new_figure(width, len(rows) * _ROW_INCHES + 0.55, title)
    axes = figure.subplots()
    names = [text_name(row.text("label")) for row in rows]
    colours = _RAMP(np.linspace(0.0, 1.0, len(parts)))
    starts = np.cumsum(values, axis=1) - values
    for place in range(len(parts)):
        axes.barh(
            range(len(rows)),
            values[:, place],
            left=starts[:, place],
            height=0.72,
            color=colours[place],
        )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel(bars.text("x_label"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=True, axis="x")
    handles = [Patch(facecolor=colours[place]) for place in range(len(parts))]
    legend_below(figure, handles, [str(part) for part in parts], handlelength=1.2)
    return figure
