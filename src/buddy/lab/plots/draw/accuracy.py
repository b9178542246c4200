"""Accuracy against executed blocks."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from buddy.errors import ResultError
from buddy.lab.plots.draw.depth_lines import draw_depth_lines
from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.names import metric_name, sentence, text_name
from buddy.lab.plots.read.points import choose, read_points
from buddy.lab.plots.style import in_paper_style


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]],
    *,
    width: float = COLUMN_INCHES,
    title: str | None = None,
    task: str | None = None,
    metric: str | None = None,
) -> Figure:
    """Draw a line a policy, in percent, with bars of one standard error.

    Args:
        records: Of evaluations whose values are fractions; their points are merged.
        width: In inches.
        title: Above the figure.
        task: `average` or `mmlu` if there is one; else the only one.
        metric: `acc` if there is one; else the only one.

    Raises:
        ResultError: Records or choices that cannot be drawn.
    """
    points = read_points(records, "accuracy")
    task = choose([point.task for point in points], task, "task", "average", "mmlu")
    points = [point for point in points if point.task == task]
    metric = choose([point.metric for point in points], metric, "metric", "acc")
    points = [point for point in points if point.metric == metric]
    for point in points:
        if not 0 <= point.value <= 1:
            raise ResultError(
                f"the accuracy figure draws fractions from 0 to 1, but {point.label!r} has "
                f"{metric} {point.value:g} on {task}: choose another --metric"
            )
    name = metric_name(metric)
    what = f"average {name}" if task == "average" else f"{text_name(task)} {name}"
    return draw_depth_lines(
        points, scale=100.0, width=width, title=title, y_label=f"{sentence(what)} (%)"
    )
