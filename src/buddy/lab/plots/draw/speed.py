"""Speed-up against executed blocks, beside what the skipped work alone would give."""

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots import style
from buddy.lab.plots.read import speed_cells

_PANEL_INCHES: Final = 1.5


@style.in_paper_style
def draw(records: style.Records, page: style.Page) -> Figure:
    """Draw a line a policy, prefill beside decode, a row for each batch and context.

    Bars span the latencies of all rounds.

    Records: of kind `eval-speed`; their cells are merged.
    """
    cells = speed_cells.read_cells(records, "speed")
    phases, settings = speed_cells.phases_of(cells), speed_cells.settings_of(cells)
    figure = page.figure(len(settings) * _PANEL_INCHES + 0.2)
    grid = figure.subplots(len(settings), len(phases), sharex=True, sharey="row", squeeze=False)
    legend: dict[str, Artist] = {}
    for row, setting in zip(grid, settings, strict=True):
        where = style.fold(
            speed_cells.setting_name(setting), page.width / len(phases) - 0.35, style.MEDIUM
        )
        for axes, phase in zip(row, phases, strict=True):
            _panel(axes, cells, phase, setting, legend)
            name = phase.capitalize()
            axes.set_title(name if len(settings) == 1 else f"{name}\n{where}")
    for axes in grid[-1]:
        axes.set_xlabel(style.fold("Executed blocks", page.width / len(phases) - 0.2, style.MEDIUM))
    style.legend_below(figure, list(legend.values()), list(legend))
    style.side_label(figure, "Speed-up over dense")
    return figure


def _panel(
    axes: Axes,
    cells: Sequence[speed_cells.SpeedCell],
    phase: str,
    setting: tuple[int, int],
    legend: dict[str, Artist],
) -> None:
    """Draw one phase at one batch and context; what it draws goes into the legend."""
    here = [cell for cell in cells if (cell.phase, cell.setting) == (phase, setting)]
    if not here:
        style.not_measured(axes)
    # Over all cells, so that a policy looks the same in every panel.
    for index, (policy, line) in enumerate(speed_cells.by_policy(cells).items()):
        _line(axes, [cell for cell in line if cell in here], index, policy, legend)
    for record in sorted({cell.record for cell in here}):
        _levels(axes, [cell for cell in here if cell.record == record], legend)
    axes.margins(y=0.08)
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    style.block_ticks(axes, [cell.blocks for cell in cells])


def _line(
    axes: Axes,
    line: Sequence[speed_cells.SpeedCell],
    index: int,
    policy: str,
    legend: dict[str, Artist],
) -> None:
    if not line:
        return
    values = [cell.speedup_own_dense for cell in line]
    # The slowest round gives the lowest speed-up, the fastest the highest.
    low = [v * (1 - c.latency_ms / c.latency_ms_max) for v, c in zip(values, line, strict=True)]
    high = [v * (c.latency_ms / c.latency_ms_min - 1) for v, c in zip(values, line, strict=True)]
    legend[policy], _, _ = axes.errorbar(
        [cell.blocks for cell in line],
        values,
        yerr=[low, high],
        elinewidth=0.5,
        capsize=0,
        **style.look(index),
    )


def _levels(axes: Axes, cells: Sequence[speed_cells.SpeedCell], legend: dict[str, Artist]) -> None:
    """One record's ideal, and transformers' own speed."""
    ideal = {cell.blocks: cell.ideal_speedup for cell in cells if cell.is_ours}
    depths = sorted(ideal)
    speedups = [ideal[depth] for depth in depths]
    dashed: dict[str, Any] = {"color": style.GREY, "linestyle": (0, (4, 2)), "zorder": 1}
    (legend["ideal"],) = axes.plot(depths, speedups, **dashed)
    dotted: dict[str, Any] = {
        "color": style.BLACK,
        "linestyle": (0, (1, 1.5)),
        "linewidth": 0.9,
        "zorder": 1,
    }
    for theirs in (cell for cell in cells if not cell.is_ours):
        legend["transformers"] = axes.axhline(theirs.speedup_own_dense, **dotted)
