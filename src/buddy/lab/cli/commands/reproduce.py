"""`buddy reproduce`: one command for each table and figure of the paper."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.lab.paper.run import Request
    from buddy.lab.paper.table import Collected, Sheet


def _check_method(text: str) -> None:
    from buddy.lab.paper.methods import read_method

    read_method(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableOptions:
    """How a table is made, and from what."""

    model: options.Model = ROUTED_MODEL
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with the data as JSON lines; the hub if not given."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for steps, record and figure; runs/reproduce/TABLE if not given."
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="The paper's settings; else quick ones.")] = (
        False
    )
    rows: Annotated[
        int | None,
        options.count(
            1,
            "--limit",
            "--rows",
            help="Most of each task or set of prompts. What the settings have if not given.",
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        options.checked(
            _check_method,
            metavar="LABEL=POLICY|MODEL|POLICY@MODEL",
            help="Another row of accuracy, gsm8k or speed; repeat for several.",
        ),
    ] = None
    dtype: options.Dtype = None

    def request(self, table: str) -> "Request":
        """What is asked of a table."""
        from buddy.lab.paper.methods import read_method
        from buddy.lab.paper.registry import default_folder
        from buddy.lab.paper.run import Request

        return Request(
            table=table,
            model=self.model,
            out=self.out or default_folder(table, self.full),
            data_dir=self.data_dir,
            full=self.full,
            rows=self.rows,
            dtype=self.dtype,
            methods=tuple(map(read_method, self.method or ())),
        )


@options.on_device
@options.grouped
def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(help="Which one: --list shows them.", show_default=False),
    ] = None,
    *,
    settings: TableOptions,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the tables, what they need and how long they take.")
    ] = False,
) -> None:
    """Make a table or figure of the paper again, on any model.

    Interrupted, the same command goes on where it stopped. The record, the figure and every step's
    own record go to --out; the paper's numbers stand beside.

    Example: `buddy reproduce speed`
    """
    from buddy.cli.views.display import stderr, stdout
    from buddy.lab.cli.commands.eval_tasks import quiet
    from buddy.lab.paper.registry import find_table

    if listing or table is None:
        _show_list(stdout())
        return
    spec = find_table(table)
    quiet()
    console, request = stderr(), settings.request(table)
    about = spec.full if request.full else f"about {spec.minutes:g} min on the default model"
    console.print(f"{table}: {spec.shows}; needs {spec.needs}; {about}", style="dim")
    collected, paths = _make(request, console)
    for sheet in collected.sheets:
        _show_sheet(console, sheet)
    for sentence in filter(None, (spec.differs, collected.differs)):
        console.print(sentence, style="dim")
    for path in paths:
        sys.stdout.write(f"{path}\n")


def _make(request: "Request", console: "Console") -> "tuple[Collected, list[Path]]":
    """Take the steps of a table; interrupted, say how to go on."""
    from buddy.cli.views.display import fetch_progress
    from buddy.lab.paper.registry import reproduce as make
    from buddy.lab.paper.run import Run

    try:
        with fetch_progress(console) as on_progress:
            run = Run(
                request=request,
                say=lambda line: console.print(line, style="dim"),
                on_progress=on_progress,
            )
            return make(run)
    except KeyboardInterrupt:
        console.print(f"interrupted: finished steps are in {request.out}; the same command goes on")
        raise typer.Exit(130) from None


def _show_sheet(console: "Console", sheet: "Sheet") -> None:
    from buddy.cli.views.tables import name_column, plain_table, show_table

    shown = plain_table(sheet.title)
    name_column(shown, sheet.columns[0])
    for name in sheet.columns[1:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in sheet.rows:
        shown.add_row(*row)
    show_table(console, shown)


def _show_list(console: "Console") -> None:
    """Each table, what it shows, what it needs and how long it takes."""
    from buddy.cli.views.tables import plain_table, show_table
    from buddy.lab.paper.registry import TABLES

    shown = plain_table()
    shown.add_column("table", no_wrap=True)
    shown.add_column("what it shows")
    shown.add_column("needs")
    shown.add_column("minutes", justify="right", no_wrap=True)
    for name, table in TABLES.items():
        about = "" if table.measured else "~"
        shown.add_row(name, table.shows, table.needs, f"{about}{table.minutes:g}")
    show_table(console, shown)
    console.print("minutes: quick settings, the default model, two cores; ~ is an estimate")


COMMAND = Command(name="reproduce", group="research", place=3, run=reproduce)
