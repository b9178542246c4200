"""What every other method loses to Buddy, against executed blocks."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from buddy.lab.plots.draw.depth_lines import draw_depth_lines
from buddy.lab.plots.names import sentence, text_name
from buddy.lab.plots.read import parts
from buddy.lab.plots.read.points import Point, narrowed
from buddy.lab.plots.style import BLACK, Page, Records, in_paper_style


@dataclass(frozen=True, slots=True)
class _Gap(parts.RecordPart):
    """A method's answers at one depth: nats above Buddy's of the same rows."""

    label: parts.Name
    blocks: parts.Blocks
    task: parts.Name
    difference: parts.Drawn
    stderr: parts.NotNegative


@dataclass(frozen=True, slots=True)
class _Depth(parts.RecordPart):
    """A point of a record, of which the model's depth is read."""

    num_blocks: parts.Blocks


@dataclass(frozen=True, slots=True)
class _Comparison(parts.RecordPart):
    """Results of a comparison of methods."""

    points: parts.Many[_Depth]
    above_buddy: parts.Many[_Gap]

    def gaps(self) -> list[Point]:
        """The differences, as points."""
        return [
            Point(
                policy=gap.label,
                label=gap.label,
                blocks=gap.blocks,
                num_blocks=self.points[0].num_blocks,
                task=gap.task,
                metric="difference",
                value=gap.difference,
                stderr=gap.stderr,
            )
            for gap in self.above_buddy
        ]


@in_paper_style
def draw(records: Records, page: Page, task: str | None = None) -> Figure:
    """Draw a line a method, in nats an answer token, with bars of one paired standard error.

    Above the line at 0 a method is worse than Buddy.

    Args:
        records: Of comparisons of methods; their differences are merged.
        page: Its room.
        task: The rows; by default the only ones there are.
    """
    opened = parts.read_results(records, "comparison", _Comparison)
    points = narrowed([point for results in opened for point in results.gaps()], "task", task)
    parts.same_num_blocks([point.num_blocks for point in points], "comparison")
    label = f"{sentence(text_name(points[0].task))}: nats above Buddy"
    figure = draw_depth_lines(points, page, scale=1.0, y_label=label)
    figure.axes[0].axhline(0.0, color=BLACK, linewidth=0.6, zorder=1)
    return figure
