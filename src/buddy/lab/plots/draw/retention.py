"""What the Budget Predictor keeps of each task's accuracy, and what it spends there."""

from collections.abc import Sequence
from typing import Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from buddy.errors import ResultError
from buddy.lab.commonsense import COMMONSENSE, metric_of
from buddy.lab.plots.names import sentence, text_name
from buddy.lab.plots.read.points import Point, choose, read_points
from buddy.lab.plots.style import BLUE, ORANGE, Page, Records, in_paper_style

_BAR_INCHES: Final = 0.16
_AVERAGE: Final = "average"
Spending = dict[str, tuple[float, float]]
"""Value under `auto` over that of every block, and mean blocks, by task."""


@in_paper_style
def draw(records: Records, page: Page, metric: str | None = None) -> Figure:
    """Draw two bars a task: retention in percent, and the mean budget in blocks.

    Args:
        records: Evaluations of tasks with `-b auto` and with every block.
        page: Its room.
        metric: One of those measured. If not given, each commonsense task has the metric that
            their average takes, GSM8K its flexible match, and other tasks have acc, or the only
            one.

    Raises:
        ResultError: Records without either of the two, or of more than one model.
    """
    points = read_points(records, "retention")
    spending = _spending(_of_metric(points, metric))
    tasks = sorted(spending, key=lambda task: (task == _AVERAGE, -spending[task][1]))
    names = [sentence(text_name(task)) for task in tasks]
    figure = page.figure(0.5 + _BAR_INCHES * len(tasks))
    retention, budgets = figure.subplots(1, 2, sharey=True)
    retention.barh(names, [100 * spending[task][0] for task in tasks], height=0.7, color=BLUE)
    retention.axvline(100, color="black", linewidth=0.6)
    retention.set_xlabel("Retention (%)")
    budgets.barh(names, [spending[task][1] for task in tasks], height=0.7, color=ORANGE)
    budgets.set_xlabel("Mean budget (blocks)")
    budgets.set_xlim(0, points[0].num_blocks)
    for axes in (retention, budgets):
        axes.grid(visible=True, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(axis="y", length=0)
    retention.invert_yaxis()
    return figure


def _of_metric(points: Sequence[Point], metric: str | None) -> list[Point]:
    """The points of one metric, or of each task's own."""
    if metric is None and any(point.task in (*COMMONSENSE, "gsm8k") for point in points):
        return [p for p in points if p.metric == metric_of(p.task)]
    wanted = choose([point.metric for point in points], metric, "metric", "acc")
    return [point for point in points if point.metric == wanted]


def _whole_models(points: Sequence[Point]) -> dict[str, float]:
    """What each task scores with every block."""
    values: dict[str, float] = {}
    for point in points:
        if point.is_whole and values.setdefault(point.task, point.value) != point.value:
            raise ResultError(
                f"{point.task} has two values with every block, {values[point.task]:g} and "
                f"{point.value:g}: the retention figure draws one model, so leave out the others"
            )
    return values


def _spending(points: Sequence[Point]) -> Spending:
    whole = _whole_models(points)
    spending, labels = {}, set()
    for point in points:
        is_subject = point.task.startswith("mmlu_") and "mmlu" in whole  # one of 57, and their mean
        if point.mean_blocks is None or point.task not in whole or is_subject:
            continue
        if whole[point.task] <= 0:
            raise ResultError(f"{point.task} scores nothing with every block: nothing can be kept")
        labels.add(point.label)
        spending[point.task] = (point.value / whole[point.task], point.mean_blocks)
    if not spending:
        raise ResultError(
            "no task was measured both with -b auto and with every block: measure one by buddy "
            "eval tasks -b auto -b 1.0"
        )
    if len(labels) > 1:
        raise ResultError(
            f"the retention figure draws one predictor, got {' and '.join(sorted(labels))}: draw a "
            "figure for each"
        )
    return spending
