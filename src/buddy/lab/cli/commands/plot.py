"""`buddy plot`: a figure from RunRecords."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.lab.plots.figures import COLUMN_INCHES, FIGURES
from buddy.lab.plots.output import check_out
from buddy.settings import Range


def plot(
    figure: Annotated[str, typer.Argument(help=f"{', '.join(FIGURES)}.")],
    records: Annotated[list[Path], typer.Argument(help="RunRecords (JSON), merged.")],
    out: Annotated[
        Path, options.checked(check_out, help="Where the figure goes: .png, .pdf or .svg.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task that accuracy, perplexity or heatmap shows. The average if not given."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric that accuracy, perplexity or retention shows. acc, or perplexity, if not "
            "given."
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Text above the figure. No text if not given.")
    ] = None,
    width: Annotated[
        float, options.number(Range(1, 100), help="Width in inches; 3.3 is a column.")
    ] = COLUMN_INCHES,
) -> None:
    """Draw a figure from what other commands measured.

    No model is run. Needs matplotlib, which the extra `plots` of buddy-llm installs.

    Example: `buddy plot speed speed.json --out speed.png`
    """
    from buddy.lab.plots.figures import draw
    from buddy.lab.plots.output import save_figure
    from buddy.records import read_record

    read = [read_record(path) for path in records]
    save_figure(draw(figure, read, width=width, title=title, task=task, metric=metric), out)
    sys.stdout.write(f"{out}\n")


COMMAND = Command(name="plot", group="research", place=2, run=plot)
