"""Accuracy against executed blocks."""

from matplotlib.figure import Figure

from buddy.errors import ResultError
from buddy.lab.plots.draw.depth_lines import draw_depth_lines
from buddy.lab.plots.names import metric_name, sentence, text_name
from buddy.lab.plots.read.points import narrowed, read_points
from buddy.lab.plots.style import Page, Records, in_paper_style


@in_paper_style
def draw(
    records: Records, page: Page, task: str | None = None, metric: str | None = None
) -> Figure:
    """Draw a line a policy, in percent, with bars of one standard error.

    Args:
        records: Of evaluations whose values are fractions; their points are merged.
        page: Its room.
        task: `average` or `mmlu` if there is one; else the only one.
        metric: `acc` if there is one; else the only one.
    """
    points = narrowed(read_points(records, "accuracy"), "task", task, "average", "mmlu")
    points = narrowed(points, "metric", metric, "acc")
    task, metric = points[0].task, points[0].metric
    for point in points:
        if not 0 <= point.value <= 1:
            raise ResultError(
                f"the accuracy figure draws fractions from 0 to 1, but {point.label!r} has "
                f"{metric} {point.value:g} on {task}: choose another --metric"
            )
    name = metric_name(metric)
    what = f"average {name}" if task == "average" else f"{text_name(task)} {name}"
    return draw_depth_lines(points, page, scale=100.0, y_label=f"{sentence(what)} (%)")
