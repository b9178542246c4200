"""What several indicators say of a model's blocks, and the orders that they remove them in."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.read.cells import colour_bar, draw_cells, stacked_axes
from buddy.lab.plots.read.orders import Importance, read_importance
from buddy.lab.plots.style import SMALL, fold, in_paper_style, legend_below, new_figure

NEVER: Final = "#D9D9D9"
_ROW_INCHES: Final = 0.14
_GROUP_INCHES: Final = 0.25
_NAME_INCHES: Final = 0.9
_CLIP: Final = 3.5


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]], *, width: float = COLUMN_INCHES, title: str | None = None
) -> Figure:
    """Draw two grids, indicator by block: the normalised score, and the place in the order.

    A search has no scores, so it is in the second alone.

    Args:
        records: What `buddy importance` writes, of one model.
        width: In inches.
        title: Above the figure.

    Raises:
        ResultError: Records that cannot be drawn.
    """
    found, num_blocks = read_importance(records)
    scored = [one for one in found if one.scores]
    grids = [len(rows) for rows in (scored, found) if rows]
    names = [fold(one.name, _NAME_INCHES, SMALL) for one in found]
    row = _ROW_INCHES * max(name.count("\n") + 1 for name in names)
    height = sum(grids) * row + len(grids) * _GROUP_INCHES + 0.3
    figure = new_figure(width, height, title)
    *above, lower = stacked_axes(figure, grids)
    for axes in above:
        scores = np.array([normalised(one.scores or ()) for one in scored])
        _grid(axes, scores, scored, "Normalised score", 1.0, row)
    places = np.array([removal_places(one, num_blocks) for one in found])
    last = float(num_blocks - 1)
    _grid(lower, places, found, "Place in the removal order (0 goes first)", last, row)
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


def removal_places(one: Importance, num_blocks: int) -> np.ndarray:
    """Each block's place in the removal order; NaN for a block that is never removed."""
    places = np.full(num_blocks, np.nan)
    places[list(one.removal_order)] = np.arange(len(one.removal_order))
    return places


def _grid(
    axes: Axes, values: np.ndarray, rows: Sequence[Importance], title: str, top: float, row: float
) -> None:
    names = [fold(one.name, _NAME_INCHES, SMALL) for one in rows]
    mesh = draw_cells(axes, values, names, cmap="viridis", vmin=0, vmax=top)
    axes.set_title(title, loc="left")
    colour_bar(axes, mesh, len(rows) * row, [0.0, top])
