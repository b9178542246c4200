"""What the Budget Predictor keeps of each task's accuracy, and what it spends there."""

from collections.abc import Sequence
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from buddy.depth.budget import AUTO
from buddy.errors import ResultError
from buddy.plots.fields import Fields, open_results
from buddy.plots.figures import COLUMN_INCHES
from buddy.plots.names import sentence, text_name
from buddy.plots.points import choose
from buddy.plots.style import BLUE, ORANGE, in_paper_style, new_figure

_BAR_INCHES: Final = 0.16
_AVERAGE: Final = "average"
Spending = dict[str, tuple[float, float]]
"""By task: value under `auto` over that of every block, and mean blocks."""


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]],
    *,
    width: float = COLUMN_INCHES,
    title: str | None = None,
    metric: str | None = None,
) -> Figure:
    """Draw two bars a task: retention in percent, and the mean budget in blocks.

    Args:
        records: Evaluations of tasks with `-b auto` and with every block.
        width: In inches.
        title: Above the figure.
        metric: One of those measured; acc, or the only one, if not given.

    Raises:
        ResultError: Records without either of the two.
    """
    items = [item for one in open_results(records, "retention") for item in one.objects("points")]
    wanted = choose([item.text("metric") for item in items], metric, "metric", "acc")
    found = _spending([item for item in items if item.text("metric") == wanted])
    tasks = sorted(found, key=lambda task: (task == _AVERAGE, -found[task][1]))
    names = [sentence(text_name(task)) for task in tasks]
    figure = new_figure(width, 0.5 + _BAR_INCHES * len(tasks), title)
    kept, spent = figure.subplots(1, 2, sharey=True)
    kept.barh(names, [100 * found[task][0] for task in tasks], height=0.7, color=BLUE)
    kept.axvline(100, color="black", linewidth=0.6)
    kept.set_xlabel("Retention (%)")
    spent.barh(names, [found[task][1] for task in tasks], height=0.7, color=ORANGE)
    spent.set_xlabel("Mean budget (blocks)")
    spent.set_xlim(0, items[0].integer("num_blocks", 1))
    for axes in (kept, spent):
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(axis="y", length=0)
    kept.invert_yaxis()
    return figure


def _spending(items: Sequence[Fields]) -> Spending:
    whole = {
        item.text("task"): item.positive("value")
        for item in items
        if item.get("budget") != AUTO and item.integer("blocks", 1) == item.integer("num_blocks", 1)
    }
    found = {
        item.text("task"): (item.number("value", 0.0) / whole[item.text("task")], item)
        for item in items
        if item.get("budget") == AUTO and item.text("task") in whole
    }
    if not found:
        raise ResultError(
            "no task was measured both with -b auto and with every block: measure one by buddy "
            "eval tasks -b auto -b 1.0"
        )
    return {
        task: (kept, item.positive("mean_blocks"))
        for task, (kept, item) in found.items()
        if not (task.startswith("mmlu_") and "mmlu" in found)  # 57 subjects, and their mean
    }
