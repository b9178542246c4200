"""`buddy data`: training rows of evaluation tasks, for `buddy train`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.files import check_writable, write_text


def data(
    task: Annotated[list[str], typer.Argument(help="Tasks of lm-eval, and samsum.")],
    out: Annotated[Path, options.checked(check_writable, help="Where the rows go (JSON lines).")],
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with TASK/train.jsonl; the hub if not given."),
    ] = None,
    rows: Annotated[
        int | None,
        options.count(
            1, "--limit", "--rows", help="Most of each task, drawn at random. All if not given."
        ),
    ] = None,
    seed: Annotated[int, options.seed("Seed of the draw, and of the rows' order.")] = 0,
    without: Annotated[
        list[Path] | None,
        typer.Option(help="Leave out the questions of these rows; repeat for several files."),
    ] = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Give the wrong answers of multiple choice too.")
    ] = False,
) -> None:
    """Write training rows, worded as evaluation words them.

    Each row names its task as `source`. Rows of all tasks are mixed at random, so any stretch of
    the file is a sample of the mix. Another draw `--without` the rows of a first one holds
    questions that a model trained on the first has not seen.

    Example: `buddy data piqa boolq --limit 1200 --out rows.jsonl`
    """
    import json

    from buddy.cli.views.display import stderr
    from buddy.lab.cli.commands.eval_tasks import quiet
    from buddy.lab.evaluation.tasks.export import export_rows, read_questions

    quiet()
    console = stderr()
    written = export_rows(
        task,
        data_dir=data_dir,
        limit=rows,
        seed=seed,
        wrong=wrong,
        without=[row for path in without or () for row in read_questions(path)],
        on_task=lambda name, count: console.print(f"{name}: {count} rows", style="dim"),
        note=lambda text: console.print(text, style="dim"),
    )
    write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written))
    sys.stdout.write(f"{out}\n")


COMMAND = Command(name="data", group="train", place=1, run=data)
