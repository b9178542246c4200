"""Where the time goes, by executed blocks."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from buddy.errors import ResultError
from buddy.lab.plots import style
from buddy.lab.plots.read import speed_cells

_PANEL_INCHES: Final = 1.35
_COLOURS: Final = (style.BLUE, style.VERMILLION, style.ORANGE, style.GREEN, style.SKY, style.GREY)
_NAMES: Final = ("blocks", "router", "gather and scatter", "KV fill", "head", "host")


@style.in_paper_style
def draw(records: style.Records, page: style.Page) -> Figure:
    """Draw a stacked bar a depth, prefill beside decode, a row for each policy and setting.

    Records: of kind `eval-speed`; their cells are merged.

    Raises:
        ResultError: Records that cannot be drawn, or none whose time is split.
    """
    cells = [
        cell for cell in speed_cells.read_cells(records, "breakdown") if cell.shares is not None
    ]
    if not cells:
        raise ResultError("the breakdown figure needs cells with shares, and there is none")
    phases, settings = speed_cells.phases_of(cells), speed_cells.settings_of(cells)
    rows = [
        (policy, setting, [cell for cell in line if cell.setting == setting])
        for policy, line in speed_cells.by_policy(cells).items()
        for setting in settings
    ]
    rows = [row for row in rows if row[2]]
    figure = page.figure(len(rows) * _PANEL_INCHES + 0.2)
    grid = figure.subplots(len(rows), len(phases), sharey=True, squeeze=False)
    for panels, (policy, setting, line) in zip(grid, rows, strict=True):
        names = [policy] * (len(rows) > len(settings))
        names += [speed_cells.setting_name(setting)] * (len(settings) > 1)
        names = [style.fold(name, page.width / len(phases) - 0.35, style.MEDIUM) for name in names]
        for axes, phase in zip(panels, phases, strict=True):
            _bars(axes, [cell for cell in line if cell.phase == phase])
            axes.set_title("\n".join([phase.capitalize(), *names]))
    for axes in grid[-1]:
        axes.set_xlabel(style.fold("Executed blocks", page.width / len(phases) - 0.2, style.MEDIUM))
    style.legend_below(figure, [Patch(facecolor=c) for c in _COLOURS], _NAMES, handlelength=1.3)
    style.side_label(figure, "Share of the time (%)")
    return figure


def _bars(axes: Axes, cells: Sequence[speed_cells.SpeedCell]) -> None:
    """One stack a cell, side by side whatever their depths."""
    if not cells:
        style.not_measured(axes)
    bottom = [0.0] * len(cells)
    for index, colour in enumerate(_COLOURS):
        heights = [100 * astuple(cell.shares)[index] for cell in cells if cell.shares]
        axes.bar(
            range(len(cells)),
            heights,
            bottom=bottom,
            width=0.72,
            color=colour,
            edgecolor="white",
            linewidth=0.3,
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(cells)), [str(cell.blocks) for cell in cells])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_locator(MultipleLocator(25))
