"""Where the time goes, by executed blocks."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from buddy.errors import ResultError
from buddy.lab.plots.read.speed_cells import (
    SpeedCell,
    by_policy,
    phases_of,
    read_cells,
    setting_name,
    settings_of,
)
from buddy.lab.plots.style import (
    BLUE,
    GREEN,
    GREY,
    MEDIUM,
    ORANGE,
    SKY,
    VERMILLION,
    Page,
    Records,
    fold,
    in_paper_style,
    legend_below,
    not_measured,
    side_label,
)

_PANEL_INCHES: Final = 1.35
_COLOURS: Final = (BLUE, VERMILLION, ORANGE, GREEN, SKY, GREY)
_NAMES: Final = ("blocks", "router", "gather and scatter", "KV fill", "head", "host")


@in_paper_style
def draw(records: Records, page: Page) -> Figure:
    """Draw a stacked bar a depth, prefill beside decode, a row for each policy and setting.

    Args:
        records: Of kind `eval-speed`; their cells are merged.
        page: Its room.

    Raises:
        ResultError: Records that cannot be drawn, or none whose time is split.
    """
    cells = [cell for cell in read_cells(records, "breakdown") if cell.shares is not None]
    if not cells:
        raise ResultError("the breakdown figure needs cells with shares, and there is none")
    phases, settings = phases_of(cells), settings_of(cells)
    rows = [
        (policy, setting, [cell for cell in line if cell.setting == setting])
        for policy, line in by_policy(cells).items()
        for setting in settings
    ]
    rows = [row for row in rows if row[2]]
    figure = page.figure(len(rows) * _PANEL_INCHES + 0.2)
    grid = figure.subplots(len(rows), len(phases), sharey=True, squeeze=False)
    for panels, (policy, setting, line) in zip(grid, rows, strict=True):
        names = [policy] * (len(rows) > len(settings))
        names += [setting_name(setting)] * (len(settings) > 1)
        names = [fold(name, page.width / len(phases) - 0.35, MEDIUM) for name in names]
        for axes, phase in zip(panels, phases, strict=True):
            _bars(axes, [cell for cell in line if cell.phase == phase])
            axes.set_title("\n".join([phase.capitalize(), *names]))
    for axes in grid[-1]:
        axes.set_xlabel(fold("Executed blocks", page.width / len(phases) - 0.2, MEDIUM))
    legend_below(figure, [Patch(facecolor=c) for c in _COLOURS], _NAMES, handlelength=1.3)
    side_label(figure, "Share of the time (%)")
    return figure


def _bars(axes: Axes, cells: Sequence[SpeedCell]) -> None:
    """One stack a cell, side by side whatever their depths."""
    if not cells:
        not_measured(axes)
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
