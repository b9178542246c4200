"""How the blocks' removal ranks move as the context grows."""

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from buddy.lab.plots.names import indicator_name
from buddy.lab.plots.read.cells import colour_bar, draw_cells, stacked_axes
from buddy.lab.plots.read.orders import ContextRanks, read_context_ranks
from buddy.lab.plots.style import BLACK, Page, Records, in_paper_style, legend_below, side_label

_ROW_INCHES: Final = 0.125
_LOWEST_INCHES: Final = 0.4
_CLEAR: Final = 2.0
"""Standard errors that a change must exceed to be marked."""


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw two grids, block by context: the mean rank, and its change since the shortest.

    A dot marks a change of more than two standard errors.

    Records: one of kind `observe-context`.
    """
    ranks_by_context = read_context_ranks(records)
    rows = len(ranks_by_context.contexts)
    row = max(_ROW_INCHES, _LOWEST_INCHES / (rows - 1))
    figure = page.figure((2 * rows - 1) * row + 1.0)
    upper, lower = stacked_axes(figure, [rows, rows - 1])
    labels = [str(context) for context in ranks_by_context.contexts]
    ranks = np.array(ranks_by_context.ranks)  # [contexts, blocks]
    top = ranks.shape[1] - 1
    mesh = draw_cells(upper, ranks, labels, cmap="viridis", vmin=0, vmax=top)
    upper.set_title(f"Mean removal rank, {indicator_name(ranks_by_context.indicator)}", loc="left")
    colour_bar(upper, mesh, rows * row)
    change = ranks[1:] - ranks[0]
    far = max(1.0, float(np.abs(change).max()))
    mesh = draw_cells(lower, change, labels[1:], cmap="PuOr", vmin=-far, vmax=far)
    lower.set_title(f"Change since {labels[0]} tokens", loc="left")
    colour_bar(lower, mesh, (rows - 1) * row)
    legend_below(
        figure,
        [_mark(lower, ranks_by_context)],
        ["changed by more than 2 standard errors"],
        markerscale=1.5,
    )
    side_label(figure, "Context (tokens)")
    return figure


def clear_changes(found: ContextRanks) -> np.ndarray:
    """Where the change since the shortest context is over two standard errors, [longer, blocks].

    The two means are taken as independent; on the same inputs that is the cautious side, as
    long as their ranks go together.
    """
    ranks, stderr = np.array(found.ranks), np.array(found.stderr)
    spread = np.hypot(stderr[1:], stderr[0])
    clear: np.ndarray = np.abs(ranks[1:] - ranks[0]) > _CLEAR * spread
    return clear


def _mark(axes: Axes, found: ContextRanks) -> PathCollection:
    rows, blocks = np.nonzero(clear_changes(found))
    size = min(1.6, 48 / len(found.ranks[0]))
    return axes.scatter(blocks, rows, s=size, color=BLACK, linewidths=0)
