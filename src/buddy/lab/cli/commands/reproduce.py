"""`buddy reproduce`: one command for each table and figure of the paper."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.hub.presets import ROUTED_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.lab.paper.table import Sheet


def _check_method(text: str) -> None:
    from buddy.lab.paper.methods import read_method

    read_method(text)


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(help="Which one: --list shows them.", show_default=False),
    ] = None,
    model: options.Model = ROUTED_MODEL,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with the data as JSON lines; the hub if not given."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for steps, record and figure; runs/reproduce/TABLE if none."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's settings; else quick ones.")
    ] = False,
    rows: Annotated[
        int | None,
        options.count(1, help="Of each task or set of prompts, in place of the settings' own."),
    ] = None,
    method: Annotated[
        list[str] | None,
        options.checked(
            _check_method,
            metavar="LABEL=POLICY|MODEL|POLICY@MODEL",
            help="Another row of accuracy, gsm8k or speed; repeat for more.",
        ),
    ] = None,
    dtype: options.Dtype = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the tables, what they need and how long they take.")
    ] = False,
) -> None:
    """Make a table or figure of the paper again, on any model.

    Interrupted, the same command goes on where it stopped. The record, the figure and every step's
    own record go to --out; the paper's numbers stand beside.
    """
    from buddy.cli.views.display import fetch_progress, stderr, stdout
    from buddy.lab.cli.commands.eval_tasks import quiet
    from buddy.lab.paper.methods import read_method
    from buddy.lab.paper.registry import default_folder, find_table
    from buddy.lab.paper.registry import reproduce as make

    if listing or table is None:
        _show_list(stdout())
        return
    found = find_table(table)
    quiet()
    from buddy.lab.paper.run import Request, Run

    console = stderr()
    request = Request(
        table=table,
        model=model,
        out=out or default_folder(table, full),
        data_dir=data_dir,
        full=full,
        rows=rows,
        dtype=dtype,
        methods=tuple(map(read_method, method or ())),
    )
    about = found.full if full else f"about {found.minutes:g} min on the default model"
    console.print(f"{table}: {found.shows}; needs {found.needs}; {about}", style="dim")
    try:
        with fetch_progress(console) as on_progress:
            run = Run(
                request=request,
                say=lambda line: console.print(line, style="dim"),
                on_progress=on_progress,
            )
            collected, paths = make(run)
    except KeyboardInterrupt:
        console.print(f"interrupted: finished steps are in {request.out}; the same command goes on")
        raise typer.Exit(130) from None
    for sheet in collected.sheets:
        _show_sheet(console, sheet)
    for sentence in filter(None, (found.differs, collected.differs)):
        console.print(sentence, style="dim")
    for path in paths:
        sys.stdout.write(f"{path}\n")


def _show_sheet(console: "Console", sheet: "Sheet") -> None:
    from rich.table import Table

    from buddy.cli.views.tables import name_column, show_table

    shown = Table(
        title=sheet.title, title_justify="left", box=None, header_style="dim", pad_edge=False
    )
    name_column(shown, sheet.columns[0])
    for name in sheet.columns[1:]:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in sheet.rows:
        shown.add_row(*row)
    show_table(console, shown)


def _show_list(console: "Console") -> None:
    """Each table, what it shows, what it needs and how long it takes."""
    from rich.table import Table

    from buddy.cli.views.tables import show_table
    from buddy.lab.paper.registry import TABLES

    shown = Table(box=None, header_style="dim", pad_edge=False)
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
