"""Which blocks run: for every input, for some, for none."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from buddy.errors import ResultError
from buddy.lab.plots.names import text_name
from buddy.lab.plots.read.cells import draw_cells, stacked_axes
from buddy.lab.plots.read.points import Execution, choose, read_execution
from buddy.lab.plots.style import Page, Records, in_paper_style, legend_below, side_label

# Darker as the rate grows, so that the three classes stay apart in grey and to any eye.
SKIPPED: Final = "#E2E2E2"
KEPT: Final = "#00694A"
VARIES: Final = LinearSegmentedColormap.from_list("varies", ["#F2D43D", "#C08A00"])

# Rates that are summed up answer by answer miss 1 by the sum's rounding.
_ROUNDING: Final = 1e-9
_ROW_INCHES: Final = 0.125
_GROUP_INCHES: Final = 0.2
# The label at the side needs as much, be there one row.
_LOWEST_INCHES: Final = 0.8

Rows = dict[int, tuple[float, ...]]


@in_paper_style
def draw(records: Records, page: Page, task: str | None = None) -> Figure:
    """Draw a row a depth, in a group a policy; of one policy, a group a task.

    Beside other policies, one whose depth no budget fixes has one row, at the mean over its tasks.
    The dense rows of policy `full` are left out where there are others.

    Args:
        records: Of evaluations; their entries are merged.
        page: Its room.
        task: Whose inputs; by default those of all tasks, each task weighing the same.
    """
    entries = read_execution(records, "heatmap")
    entries = [entry for entry in entries if entry.policy != "full"] or entries
    if task is not None:
        choose([entry.task for entry in entries], task, "task")
        entries = [entry for entry in entries if entry.task == task]
    if len({entry.label for entry in entries}) > 1:
        entries = _levelled(entries)
    groups = _groups(entries)
    counts = [len(rows) for rows in groups.values()]
    height = sum(counts) * _ROW_INCHES + len(counts) * _GROUP_INCHES + 0.3
    figure = page.figure(max(height, _LOWEST_INCHES))
    for axes, (name, rows) in zip(stacked_axes(figure, counts), groups.items(), strict=True):
        depths = sorted(rows, reverse=True)
        colours = np.array([[rate_colour(rate) for rate in rows[depth]] for depth in depths])
        draw_cells(axes, colours, [str(depth) for depth in depths])
        axes.set_title(name, loc="left")
    figure.axes[-1].set_xlabel(f"Block{_inputs(entries)}")
    legend_below(figure, *_legend(), handlelength=1.3)
    side_label(figure, "Executed blocks")
    return figure


def rate_colour(rate: float) -> tuple[float, float, float]:
    """The colour of a block that runs for this share of the inputs."""
    if min(rate, 1 - rate) < _ROUNDING:
        return to_rgb(KEPT if rate > 0.5 else SKIPPED)
    return to_rgb(VARIES(rate))


def _levelled(entries: Sequence[Execution]) -> list[Execution]:
    """The entries, where those whose depth no budget fixes are all at the mean of their label."""
    means: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry.mean_blocks is not None:
            means.setdefault(entry.label, {})[entry.task] = entry.mean_blocks
    return [
        entry
        if entry.mean_blocks is None
        else replace(entry, blocks=round(fmean(means[entry.label].values())))
        for entry in entries
    ]


def _groups(entries: Sequence[Execution]) -> dict[str, Rows]:
    """Rates by group and depth: groups are policies if there are several, else tasks."""
    by_label: dict[str, dict[str, Rows]] = {}
    for entry in entries:
        rows = by_label.setdefault(entry.label, {}).setdefault(entry.task, {})
        if rows.setdefault(entry.blocks, entry.rates) != entry.rates:
            raise ResultError(
                f"{entry.label!r} has two sets of rates on {entry.task} at {entry.blocks} blocks: "
                "leave out one of the records, or make one again under another label"
            )
    if len(by_label) > 1:
        return {label: _mean(tasks) for label, tasks in by_label.items()}
    return {
        f"{label}, {text_name(task)}": rows
        for label, tasks in by_label.items()
        for task, rows in tasks.items()
    }


def _inputs(entries: Sequence[Execution]) -> str:
    """Whose inputs the rows are of, where the groups do not say it."""
    tasks = {entry.task for entry in entries}
    if len({entry.label for entry in entries}) == 1:
        return ""
    if len(tasks) == 1:
        return f" ({text_name(*tasks)})"
    rows = {(entry.label, entry.blocks, entry.task) for entry in entries}
    counts = Counter((label, blocks) for label, blocks, _ in rows).values()
    fewest = f"{min(counts)} to " if min(counts) < max(counts) else ""
    return f" (mean of {fewest}{max(counts)} tasks)"


def _mean(tasks: Mapping[str, Rows]) -> Rows:
    """Rates over all tasks; a mean of 1 is 1 in each, and so is a mean of 0."""
    depths = {depth for rows in tasks.values() for depth in rows}
    return {
        depth: tuple(np.mean([rows[depth] for rows in tasks.values() if depth in rows], axis=0))
        for depth in depths
    }


def _legend() -> tuple[list[Patch], list[str]]:
    shown = {
        "skipped": rate_colour(0.0),
        "run for few": rate_colour(0.05),
        "for most": rate_colour(0.95),
        "for all inputs": rate_colour(1.0),
    }
    return [Patch(facecolor=colour) for colour in shown.values()], list(shown)
