"""Grids of coloured cells with a column a block: what the heat maps share."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from buddy.lab.plots.style import block_ticks

_BAR_INCHES: Final = 0.09


def stacked_axes(figure: Figure, rows: Sequence[int]) -> list[Axes]:
    """Axes under each other, as high as their rows, with one x axis at the bottom."""
    grid = figure.subplots(
        len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": list(rows)}
    )
    axes = list(grid[:, 0])
    for upper in axes[:-1]:
        upper.tick_params(bottom=False)
    axes[-1].set_xlabel("Block")
    return axes


def draw_cells(axes: Axes, values: np.ndarray, labels: Sequence[str], **look: Any) -> QuadMesh:
    """Draw cells with the first row on top, centred on whole numbers.

    Args:
        axes: Where.
        values: [rows, blocks], or [rows, blocks, 3] for colours.
        labels: One a row.
        look: As `Axes.pcolormesh` takes it.
    """
    rows, blocks = values.shape[:2]
    mesh = axes.pcolormesh(
        np.arange(blocks + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        values,
        edgecolors="white",
        linewidth=min(0.3, 9 / blocks),  # narrow cells would be more gap than cell
        **look,
    )
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_yticks(range(rows), labels)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    block_ticks(axes)
    return mesh


def colour_bar(
    axes: Axes, mesh: QuadMesh, height: float, ticks: Sequence[float] | None = None
) -> None:
    """A bar beside cells of a height in inches, as thin whatever that is."""
    figure = mesh.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(mesh, ax=axes, aspect=height / _BAR_INCHES, pad=0.02, ticks=ticks)
    bar.outline.set_visible(False)
