"""What every `buddy eval` command does around its measurement: load, log, show progress, record."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TaskID

from buddy.budget.request import BudgetRequest, read_budget
from buddy.cli import options
from buddy.cli.commands.importance import computed_by
from buddy.cli.loading import load_checked, say_if_slow
from buddy.cli.views.bars import Bars
from buddy.cli.views.display import fetch_progress, stderr
from buddy.cli.views.tables import name_column, show_table
from buddy.errors import BuddyError, PolicyError, ResultError
from buddy.files import check_writable

if TYPE_CHECKING:
    from buddy.lab.evaluation.conditions import Condition
    from buddy.lab.evaluation.samples import SampleLog
    from buddy.model import BuddyForCausalLM


def check_route_on(value: str) -> None:
    """Refuse what is nothing that a route could see.

    Raises:
        PolicyError: Neither prompt nor full.
    """
    if value not in ("prompt", "full"):
        raise PolicyError(f"--route-on must be prompt or full, got {value!r}")


Out = Annotated[
    Path,
    options.checked(
        check_writable,
        help="Where the RunRecord goes (JSON); the samples go beside it (.samples.jsonl).",
    ),
]
Budgets = Annotated[
    list[BudgetRequest] | None,
    options.read_by(
        read_budget,
        "--budget",
        "-b",
        help='Repeat for several: 0.75, 75%, "18 blocks"; of tasks also auto, of answers and '
        "summaries mean:0.7. Full depth if none.",
    ),
]
Policies = Annotated[
    list[str] | None,
    options.checked(
        options.check_labelled_policy,
        help="Repeat for several: SPEC or LABEL=SPEC, as generate takes it.",
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data as JSON lines; the hub if not given.")
]
Limit = Annotated[int | None, options.count(1, help="At most this many samples of each task.")]
AgainstLog = Annotated[
    Path | None,
    typer.Option(
        "--against",
        metavar="SAMPLES",
        help="Log of an earlier run on the same rows (.samples.jsonl): also write the differences "
        "from it, taken row by row.",
    ),
]
RouteOn = Annotated[
    str,
    options.checked(
        check_route_on, help="What the route sees: prompt, or full (the answers too: it leaks)."
    ),
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
    bar: Bars
    task: TaskID
    config: dict[str, Any]

    def total(self, samples: int) -> None:
        """Say how many samples there will be, over all conditions."""
        self.bar.update(self.task, total=samples)

    def tell_left_out(self, notes: list[str]) -> None:
        """Say which rows were left out and why, here and in the record."""
        self.config["left_out"] = notes
        for note in notes:
            self.bar.console.print(note, style="dim")

    def show(self, condition: "Condition") -> None:
        """Say which condition is running."""
        is_number = condition.budget.blocks is not None
        depth = f" {condition.depth} blocks" if is_number else ""
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
    budgets: Sequence[BudgetRequest] | None,
    config: dict[str, Any],
    auto: bool = False,
    means: bool = False,
    generates: bool = False,
    dtype: str | None = None,
    check: "Callable[[BuddyForCausalLM], object]" = lambda outline: None,
) -> Iterator[EvalRun]:
    """Load the model, open the log and a progress bar; interrupted, say how to go on.

    Args:
        model: As on the command line.
        out: Of the record.
        policies: To compare; the model's own if none.
        budgets: To compare them at; full depth if none.
        config: All settings that samples depend on, and `limit`.
        auto: Whether the Budget Predictor may choose: what is measured are prompts.
        means: Whether the ledger may: what is measured are answers.
        generates: Whether text is decoded, so that the engine has a part in it.
        dtype: Of the model; as saved if None.
        check: Refuses what this model cannot do, before its weights are fetched.

    Raises:
        BuddyError: The model, a policy or a budget is no good, or the log is another run's.
    """
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.evaluation.conditions import plan_conditions
    from buddy.lab.evaluation.samples import SampleLog

    console = stderr()
    asked = (policies or (), budgets or ("1.0",))

    def check_all(outline: "BuddyForCausalLM") -> None:
        check(outline)
        plan_conditions(outline, *asked, auto=auto, means=means)

    loaded = load_checked(model, check_all, console, dtype=dtype)
    if not generates:
        say_if_slow(loaded, console)
    tokenizer = load_tokenizer(model)
    conditions = plan_conditions(loaded, *asked, auto=auto, means=means)
    with fetch_progress(console) as on_progress:
        for condition in conditions:
            condition.prepare(on_progress)
    full = {"model": model, "dtype": str(loaded.dtype), **config}
    # More samples of the same kind may be asked for later.
    settings = {name: value for name, value in config.items() if name != "limit"}
    identity = {
        **settings,
        **computed_by(loaded),
        "kv_policy": config.get("kv_policy") or loaded.kv_policy,
        "engine": loaded.executor.name if generates else None,
        "tokenizer": _tokenizer_mark(tokenizer),
    }
    with (
        SampleLog(out.with_suffix(".samples.jsonl"), identity) as log,
        Bars(console) as bar,
    ):
        if log.num_samples:
            bar.console.print(f"going on from {log.num_samples} samples in {log.path}", style="dim")
        task = bar.add_task("", total=None)
        try:
            for condition in conditions:
                log.declare({**condition.describe(), "key": condition.key})
            yield EvalRun(console, loaded, tokenizer, conditions, log, bar, task, full)
        except KeyboardInterrupt:
            bar.stop()
            console.print(
                f"interrupted: {log.num_samples} samples are kept in {log.path}; the same command "
                "goes on"
            )
            raise typer.Exit(130) from None


def _tokenizer_mark(tokenizer: Any) -> str:
    """SHA-256 of what turns texts into tokens, and requests into prompts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # some are written in Python
    told = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    parts = [told, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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
    record = RunRecord(kind=kind, config=config, results=results, model=run.model.facts())
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
    name_column(table, "policy")
    table.add_column("blocks", justify="right", no_wrap=True)
    for task, metric in columns:
        table.add_column(f"{task}\n{metric}", justify="right", no_wrap=True)
    # Many columns leave room for one error: that of the last, which is the average.
    bare = set(columns[:-1]) if len(columns) > 4 else set()
    rows: dict[tuple[str, str], dict[tuple[str, str], dict[str, Any]]] = {}
    for point in points:
        # What no budget fixes differs from task to task.
        is_free = "mean_blocks" in point
        blocks = point.get("budget", "") if is_free else str(point["blocks"])
        row = rows.setdefault((point["label"], blocks), {})
        row[point["task"], point["metric"]] = point
    for (label, blocks), row in rows.items():
        cells = [
            _cell(row[column], bare=column in bare) if column in row else "" for column in columns
        ]
        table.add_row(label, blocks, *cells)
    show_table(console, table)


def show_differences(console: Console, points: Sequence[dict[str, Any]], against: Path) -> None:
    """A table: one row a condition, what it is compared with and a task."""
    from rich.table import Table

    table = Table(
        title=f"less {against.name}, row by row",
        title_justify="left",
        box=None,
        header_style="dim",
        pad_edge=False,
    )
    names = list(dict.fromkeys(one["metric"] for one in points))
    for name in ("policy", "less", "blocks", "task", *names, "rows"):
        right = name in ("blocks", "rows", *names)
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for one in points:
        what = tuple(str(one[name]) for name in ("label", "minus", "blocks", "task"))
        rows.setdefault(what, {})[one["metric"]] = one
    for row, found in rows.items():
        samples = next(iter(found.values()))["samples"]
        cells = (_difference(found[name]) if name in found else "" for name in names)
        table.add_row(*row, *cells, str(samples))
    show_table(console, table)


def _difference(point: dict[str, Any]) -> str:
    error = "" if point["stderr"] is None else f" ± {point['stderr']:.3f}"
    return f"{point['value']:+.3f}{error}"


def _cell(point: dict[str, Any], *, bare: bool) -> str:
    name, _, _ = point["metric"].partition(",")
    scale = 1.0 if name.endswith(("perplexity", "nll", "bits_per_byte")) else 100.0
    value = f"{point['value'] * scale:.4g}" if scale == 1.0 else f"{point['value'] * scale:.1f}"
    error = point.get("stderr")
    value = value if error is None or bare else f"{value} ± {error * scale:.2g}"
    return f"{value} at {point['mean_blocks']:.1f}" if "mean_blocks" in point else value
