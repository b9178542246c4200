"""What every `buddy eval` command does around its measurement: load, log, show progress, record."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from buddy.cli.views.display import fetch_progress, stderr
from buddy.errors import BuddyError, ResultError
from buddy.files import check_writable

if TYPE_CHECKING:
    from buddy.evaluation.conditions import Condition
    from buddy.evaluation.samples import SampleLog
    from buddy.model import BuddyForCausalLM

Out = Annotated[
    Path,
    typer.Option(
        help="Where the RunRecord goes (JSON); the samples go beside it (.samples.jsonl)."
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        help='Repeat for several: 0.75, 75%, "18 blocks"; of tasks also auto. Full depth if none.',
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="Repeat for several: SPEC or LABEL=SPEC, as generate takes it."),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data as JSON lines; the hub if not given.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many samples of each task.")]
RouteOn = Annotated[
    str,
    typer.Option(help="What the route sees: prompt, or full (the answers too: it leaks)."),
]


@dataclass(slots=True)
class EvalRun:
    """A run that has begun.

    Attributes:
        model: Loaded.
        tokenizer: Its own.
        conditions: What is compared.
        log: Of samples, beside the record.
        bar: Of progress; `advance` moves it on.
    """

    console: Console
    model: "BuddyForCausalLM"
    tokenizer: Any
    conditions: "list[Condition]"
    log: "SampleLog"
    bar: Progress
    task: TaskID
    config: dict[str, Any]

    def total(self, samples: int) -> None:
        """Say how many samples there will be, over all conditions."""
        self.bar.update(self.task, total=samples)

    def show(self, condition: "Condition") -> None:
        """Say which condition is running."""
        depth = "" if condition.is_auto else f" {condition.depth} blocks"
        self.bar.update(self.task, description=f"{condition.label}{depth}")

    def advance(self, samples: int = 1) -> None:
        """Move the bar on."""
        self.bar.advance(self.task, samples)


@contextmanager
def eval_run(
    model: str,
    out: Path,
    *,
    policies: Sequence[str] | None,
    budgets: Sequence[str] | None,
    config: dict[str, Any],
    auto: bool = False,
) -> Iterator[EvalRun]:
    """Load the model, open the log and a progress bar; interrupted, say how to go on.

    Args:
        model: As on the command line.
        out: Of the record.
        policies: To compare; the model's own if none.
        budgets: To compare them at; full depth if none.
        config: All settings that samples depend on, and `limit`.
        auto: Whether the Budget Predictor may choose: what is measured are prompts.

    Raises:
        BuddyError: The model, a policy or a budget is no good, or the log is another run's.
    """
    from buddy.evaluation.conditions import plan_conditions
    from buddy.evaluation.samples import SampleLog
    from buddy.hub.loading import load_tokenizer
    from buddy.model import BuddyForCausalLM

    check_writable(out)
    console = stderr()
    with fetch_progress(console) as on_progress:
        loaded = BuddyForCausalLM.from_pretrained(
            model, merge_adapter=True, on_progress=on_progress
        )
        conditions = plan_conditions(loaded, policies or (), budgets or ("1.0",), auto=auto)
        for condition in conditions:
            condition.prepare(on_progress)
    full = {"model": model, "dtype": str(loaded.dtype), **config}
    # More samples of the same kind may be asked for later.
    identity = {name: value for name, value in full.items() if name != "limit"}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with (
        SampleLog(out.with_suffix(".samples.jsonl"), identity) as log,
        Progress(*columns, console=console, transient=True) as bar,
    ):
        if log.num_samples:
            bar.console.print(f"going on from {log.num_samples} samples in {log.path}", style="dim")
        task = bar.add_task("", total=None)
        try:
            yield EvalRun(console, loaded, load_tokenizer(model), conditions, log, bar, task, full)
        except KeyboardInterrupt:
            bar.stop()
            console.print(
                f"interrupted: {log.num_samples} samples are kept in {log.path}; the same command "
                "goes on"
            )
            raise typer.Exit(130) from None


def save_record(run: EvalRun, kind: str, out: Path, results: dict[str, Any]) -> None:
    """Write the record; its path goes to stdout.

    Raises:
        ResultError: It cannot be written; the samples are kept.
    """
    from buddy.records import RunRecord

    config = {
        **run.config,
        "prior": run.model.prior_facts,
        "conditions": [
            {**condition.describe(), "describe": condition.policy.describe()}
            for condition in run.conditions
        ],
    }
    record = RunRecord(
        kind=kind, command=shlex.join(["buddy", *sys.argv[1:]]), config=config, results=results
    )
    try:
        record.save(out)
    except BuddyError as error:
        raise ResultError(
            f"{error}; all {run.log.num_samples} samples are kept in {run.log.path}: the same "
            "command writes the record without measuring again"
        ) from error
    sys.stdout.write(f"{out}\n")


def show_points(
    console: Console, points: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]]
) -> None:
    """A table: one row a condition, one column a (task, metric); shares as percent."""
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("blocks", justify="right")
    for task, metric in columns:
        last = (task, metric) == columns[-1]
        table.add_column(f"{task}\n{metric}", justify="right", overflow="fold", no_wrap=last)
    # Many columns leave room for one error: that of the last, which is the average.
    bare = set(columns[:-1]) if len(columns) > 4 else set()
    rows: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for point in points:
        # What the predictor spends differs from task to task.
        blocks = "auto" if point.get("budget") == "auto" else str(point["blocks"])
        row = rows.setdefault((point["label"], blocks), {})
        row[point["task"], point["metric"]] = point
    for (label, blocks), row in rows.items():
        cells = [
            _cell(row[column], bare=column in bare) if column in row else "" for column in columns
        ]
        table.add_row(label, blocks, *cells)
    console.print(table)


def _cell(point: dict[str, Any], *, bare: bool) -> str:
    scale = 1.0 if point["metric"] in ("perplexity", "nll") else 100.0
    value = f"{point['value'] * scale:.4g}" if scale == 1.0 else f"{point['value'] * scale:.1f}"
    error = point.get("stderr")
    value = value if error is None or bare else f"{value} ± {error * scale:.2g}"
    return f"{value} at {point['mean_blocks']:.1f}" if "mean_blocks" in point else value
