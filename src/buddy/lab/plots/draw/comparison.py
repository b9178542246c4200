"""What every other method loses to Buddy, against executed blocks."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from buddy.lab.plots.draw.depth_lines import draw_depth_lines
from buddy.lab.plots.figures import COLUMN_INCHES
from buddy.lab.plots.names import sentence, text_name
from buddy.lab.plots.read.fields import MOST_BLOCKS, Fields, open_results, same_num_blocks
from buddy.lab.plots.read.points import Point, choose
from buddy.lab.plots.style import BLACK, in_paper_style


@in_paper_style
def draw(
    records: Sequence[dict[str, Any]],
    *,
    width: float = COLUMN_INCHES,
    title: str | None = None,
    task: str | None = None,
) -> Figure:
    """Draw a line a method, in nats an answer token, with bars of one paired standard error.

    Above the line at 0 a method is worse than Buddy.

    Args:
        records: Of comparisons of methods; their differences are merged.
        width: In inches.
        title: Above the figure.
        task: The rows; by default the only ones there are.

    Raises:
        ResultError: Records or choices that cannot be drawn.
    """
    points = [point for results in open_results(records, "comparison") for point in _gaps(results)]
    task = choose([point.task for point in points], task, "task")
    points = [point for point in points if point.task == task]
    same_num_blocks([point.num_blocks for point in points], "comparison")
    label = f"{sentence(text_name(task))}: nats above Buddy"
    figure = draw_depth_lines(points, scale=1.0, width=width, title=title, y_label=label)
    figure.axes[0].axhline(0.0, color=BLACK, linewidth=0.6, zorder=1)
    return figure


def _gaps(results: Fields) -> list[Point]:
    """The differences of one record, as points."""
    num_blocks = results.objects("points")[0].integer("num_blocks", 1, MOST_BLOCKS)
    return [
        Point(
            policy=item.text("label"),
            label=item.text("label"),
            blocks=item.integer("blocks", 1, num_blocks),
            num_blocks=num_blocks,
            task=item.text("task"),
            metric="difference",
            value=item.number("difference"),
            stderr=item.number("stderr", 0.0),
            reroute=None,
            mean_blocks=None,
            prefill_blocks=None,
        )
        for item in results.objects("above_buddy")
    ]
