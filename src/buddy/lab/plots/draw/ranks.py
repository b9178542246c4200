"""How a block's removal rank varies from input to input."""

from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots import style
from buddy.lab.plots.read.orders import read_rank_series

_PANEL_INCHES: Final = 1.05
_LOWEST_INCHES: Final = 1.4
# A page's width, where two panels stand side by side.
_WIDE_INCHES: Final = 6.0
_WHISKERS: Final = (5, 95)


@style.in_paper_style
def draw(records: style.Records, page: style.Page) -> Figure:
    """Draw a box a block, in a panel for each indicator and text.

    Boxes span the middle half of the inputs, whiskers the middle 90 %.

    Records: of kind `observe-ranks`; their series are merged.
    """
    series = read_rank_series(records)
    columns = 2 if page.width >= _WIDE_INCHES and len(series) % 2 == 0 else 1
    rows = len(series) // columns
    figure = page.figure(max(rows * _PANEL_INCHES, _LOWEST_INCHES) + 0.3)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, ranks) in zip(grid.flat, series.items(), strict=True):
        _boxes(axes, np.array(ranks.ranks))
        axes.set_title(name, loc="left")
    for axes in grid[-1, :]:
        axes.set_xlabel("Block")
    style.side_label(figure, "Removal rank (0 goes first)")
    return figure


def _boxes(axes: Axes, ranks: np.ndarray) -> None:
    """Draw a box for each column of ranks, [inputs, blocks]."""
    blocks = ranks.shape[1]
    axes.boxplot(
        ranks,
        positions=range(blocks),
        widths=0.62,
        whis=_WHISKERS,
        showfliers=False,
        showcaps=False,
        patch_artist=True,
        manage_ticks=False,
        boxprops={"facecolor": style.SKY, "edgecolor": style.BLUE, "linewidth": 0.4},
        whiskerprops={"color": style.BLUE, "linewidth": 0.6},
        medianprops={"color": style.BLACK, "linewidth": 1.2, "solid_capstyle": "butt"},
    )
    axes.set_xlim(-0.8, blocks - 0.2)
    axes.set_ylim(-0.5 - 0.02 * blocks, blocks - 0.5 + 0.02 * blocks)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y")
    style.block_ticks(axes)
