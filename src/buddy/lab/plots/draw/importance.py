"""What several indicators say of a model's blocks, and the orders that they remove them in."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from buddy.lab.plots.read.cells import colour_bar, draw_cells, stacked_axes
from buddy.lab.plots.read.orders import Importance, read_importance
from buddy.lab.plots.style import SMALL, Page, Records, fold, in_paper_style, legend_below

NEVER: Final = "#D9D9D9"
_ROW_INCHES: Final = 0.14
_GROUP_INCHES: Final = 0.25
_NAME_INCHES: Final = 0.9
_CLIP: Final = 3.5


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw two grids, indicator by block: the normalised score, and the place in the order.

    A search has no scores, so it is in the second alone.

    Records: what `buddy importance` writes, of one model.
    """
    indicators, num_blocks = read_importance(records)
    scored = {name: own.importance for name, own in indicators.items() if own.importance}
    grids = [len(rows) for rows in (scored, indicators) if rows]
    lines = [fold(name, _NAME_INCHES, SMALL).count("\n") + 1 for name in indicators]
    row = _ROW_INCHES * max(lines)
    height = sum(grids) * row + len(grids) * _GROUP_INCHES + 0.3
    figure = page.figure(height)
    *above, lower = stacked_axes(figure, grids)
    for axes in above:
        scores = np.array([normalised(own) for own in scored.values()])
        _grid(axes, scores, scored, "Normalised score", 1.0, row)
    places = np.array([removal_places(own, num_blocks) for own in indicators.values()])
    last = float(num_blocks - 1)
    _grid(lower, places, indicators, "Place in the removal order (0 goes first)", last, row)
    if np.isnan(places).any():
        lower.set_facecolor(NEVER)
        legend_below(figure, [Patch(facecolor=NEVER)], ["never removed"], handlelength=1.3)
    return figure


def normalised(scores: Sequence[float]) -> np.ndarray:
    """Scores of any unit on one scale from 0 to 1, the median at a half.

    Source: the paper's prior, steps i to iv with the sigmoid, tau 1 and clip 3.5.
    """
    logs = np.log1p(np.clip(np.array(scores), 0, None))
    low, middle, high = np.percentile(logs, (25, 50, 75))
    spread = (high - low) or 1.0
    z = np.clip((logs - middle) / spread, -_CLIP, _CLIP)
    squashed: np.ndarray = 1 / (1 + np.exp(-z))
    return squashed


def removal_places(indicator: Importance, num_blocks: int) -> np.ndarray:
    """Each block's place in the removal order; NaN for a block that is never removed."""
    places = np.full(num_blocks, np.nan)
    order = list(indicator.removal_order)
    places[order] = np.arange(len(order))
    return places


def _grid(
    axes: Axes, values: np.ndarray, rows: Iterable[str], title: str, top: float, row: float
) -> None:
    names = [fold(name, _NAME_INCHES, SMALL) for name in rows]
    mesh = draw_cells(axes, values, names, cmap="viridis", vmin=0, vmax=top)
    axes.set_title(title, loc="left")
    colour_bar(axes, mesh, len(names) * row, [0.0, top])
