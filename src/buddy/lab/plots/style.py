"""How every figure looks: a paper's column, small type, colours that everyone can tell apart."""

import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from buddy.errors import ResultError
from buddy.lab.plots.figures import COLUMN_INCHES

# Okabe and Ito's palette, but for its yellow, which fades on white.
BLUE: Final = "#0072B2"
VERMILLION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
BLACK: Final = "#000000"
GREY: Final = "#8A8A8A"
COLOURS: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)

SMALL: Final = 6.5
"""Points: of ticks and legends."""
MEDIUM: Final = 7.0
"""Points: of axes and panels."""
_LARGE: Final = 8.0

_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_DASHES: Final = ("solid", (0, (4, 1.2)), (0, (5, 1.2, 1, 1.2)))
_WIDTHS: Final = (2.0, 20.0)
_PAD_INCHES: Final = 0.02
_STYLE: Final = Path(__file__).with_name("paper.mplstyle")
Records = Sequence[dict[str, Any]]
"""Records as `buddy.records.read_record` gives them."""


def paper_style() -> AbstractContextManager[None]:
    """Our settings alone, whatever the user's own are; these come back at the end."""
    return matplotlib.style.context(["default", _STYLE])


@dataclass(frozen=True, slots=True)
class Page:
    """The room that a figure has, and what stands above it."""

    width: float = COLUMN_INCHES
    """Inches."""
    title: str | None = None

    def figure(self, height: float) -> Figure:
        """An empty figure as high as that, in inches, and its title.

        Raises:
            ResultError: A width that nothing fits in, or that no page has.
        """
        low, high = _WIDTHS
        if not low <= self.width <= high:
            raise ResultError(
                f"a figure is {low:g} to {high:g} inches wide, got {self.width:g}; a paper's "
                "column has 3.3"
            )
        layout = ConstrainedLayoutEngine(w_pad=_PAD_INCHES, h_pad=_PAD_INCHES)
        figure = Figure(figsize=(self.width, height), layout=layout)
        FigureCanvasAgg(figure)
        if self.title:
            text = fold(self.title, self.width, _LARGE)
            figure.suptitle(text)
            figure.set_figheight(height + 0.15 * (text.count("\n") + 1))
        return figure


def in_paper_style(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """A figure's function as callers have it: `draw(records, width=3.3, title=None, **choices)`.

    The figure is made under `paper_style`, and laid out before it leaves: ticks are made when
    first drawn, from the settings of that moment. Every such function raises a ResultError for
    records, a width or choices that cannot be drawn.

    Args:
        draw: Takes the records, the page that the figure is to fill, and the figure's choices.
    """

    @wraps(draw)
    def styled(
        records: Records,
        *,
        width: float = COLUMN_INCHES,
        title: str | None = None,
        **choices: Any,
    ) -> Figure:
        with paper_style():
            figure = draw(records, Page(width, title), **choices)
            figure.draw_without_rendering()
        return figure

    return styled


def fold(text: str, width: float, size: float) -> str:
    """Break a line that would not fit a width in inches at a size in points."""
    # 0.6 em is a wide mean of this typeface's letters.
    return textwrap.fill(text, max(8, int(width * 72 / (0.6 * size))))


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line; no two of the first 210 are alike."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markeredgecolor": "white",
    }


def side_label(figure: Figure, text: str) -> None:
    """Name the y axis of all panels at once; call it last, as it takes the layout for settled."""
    label = figure.supylabel(text, fontsize=MEDIUM)
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes]
    middle = (min(box.y0 for box in boxes) + max(box.y1 for box in boxes)) / 2
    # A label longer than low panels are high stays on the page.
    half = label.get_window_extent().height / figure.bbox.height / 2
    label.set_y(min(max(middle, half), 1 - half))


def legend_below(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], **look: Any
) -> Legend:
    """A legend under the axes, in as few rows as fit; the figure grows by its height."""
    texts = [fold(label, figure.get_figwidth() - 0.5, SMALL) for label in labels]
    for rows in range(1, len(texts) + 1):
        legend = figure.legend(
            handles=list(handles),
            labels=texts,
            loc="outside lower center",
            ncols=math.ceil(len(texts) / rows),
            **look,
        )
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or rows == len(texts):
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
    return legend


def not_measured(axes: Axes) -> None:
    """Say why a panel is empty."""
    axes.text(0.5, 0.5, "not measured", color=GREY, ha="center", transform=axes.transAxes)


def block_ticks(axes: Axes, blocks: Sequence[int] | None = None) -> None:
    """Whole numbers on the x axis: the very depths that were run where there is room."""
    width = axes.get_figure().get_figwidth()  # type: ignore[union-attr]
    depths = sorted(set(blocks or ()))
    span = (depths[-1] - depths[0]) if depths else 0
    gaps = [after - before for before, after in pairwise(depths)]
    columns = axes.get_subplotspec().get_gridspec().ncols  # type: ignore[union-attr]
    room = int((width - 0.6) / columns / 0.24)
    if depths and (not gaps or min(gaps) * room >= span):
        axes.xaxis.set_major_locator(FixedLocator(depths))
    else:
        axes.xaxis.set_major_locator(
            MaxNLocator(max(2, min(room, 9)), integer=True, steps=[1, 2, 5, 10])
        )
    axes.xaxis.set_minor_locator(NullLocator())
