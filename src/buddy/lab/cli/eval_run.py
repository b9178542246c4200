"""What every `buddy eval` command does around its measurement: load, log, show progress, record."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.budget.request import BudgetRequest, read_budget
from buddy.cli import options
from buddy.cli.loading import computed_by, load_checked, say_if_slow
from buddy.cli.named import BUDGETS, offer, policies
from buddy.cli.options import ExecutionOptions
from buddy.errors import BuddyError, PolicyError, ResultError
from buddy.files import alone, check_writable
from buddy.hub.presets import ROUTED_MODEL
from buddy.processes import launched

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from buddy.cli.views.bars import Bars
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
        "summaries mean:0.7, of what is generated prompt:1,think:0.6,answer:1. Full depth if not "
        "given.",
        autocompletion=offer(*BUDGETS),
    ),
]
Policies = Annotated[
    list[str] | None,
    options.checked(
        options.check_labelled_policy,
        help="Repeat for several: SPEC or LABEL=SPEC, as generate takes it. The model's own if not "
        "given.",
        autocompletion=policies,
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data as JSON lines; the hub if not given.")
]
Limit = Annotated[
    int | None, options.count(1, help="Most questions of each task. All if not given.")
]
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
        check_route_on,
        help="What the route sees: prompt, or full (the answers too: it leaks).",
        autocompletion=offer("prompt", "full"),
    ),
]


def tell_of_hub(data: str, data_dir: Path | None) -> None:
    """Say that data comes from the hub, which may take long, unless a folder was named."""
    if data_dir is None:
        from buddy.cli.views.display import stderr

        stderr().print(f"{data}: from the hub; --data-dir names a local folder", style="dim")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """What every evaluation is told: where its record goes, and what is compared."""

    out: Out
    model: options.Model = ROUTED_MODEL
    budget: Budgets = None
    policy: Policies = None
    dtype: options.Dtype = None


@dataclass(slots=True)
class EvalRun:
    """A run that has begun.

    Attributes:
        out: Where the record goes.
        model: Loaded.
        tokenizer: Its own.
        conditions: What is compared.
        log: Of samples, beside the record.
        bar: Of progress; `advance` moves it on.
        config: What the record says of the settings.
    """

    out: Path
    model: "BuddyForCausalLM"
    tokenizer: Any
    conditions: "list[Condition]"
    log: "SampleLog"
    bar: "Bars"
    task: "TaskID"
    config: dict[str, Any]

    @property
    def console(self) -> "Console":
        """Where tables are shown."""
        return self.bar.console

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

    def count(self, condition: "Condition", samples: int) -> None:
        """Say which condition has so many samples more."""
        self.show(condition)
        self.advance(samples)


@contextmanager
def eval_run(
    compared: EvalOptions,
    config: dict[str, Any],
    *,
    auto: bool = False,
    means: bool = False,
    thinking: bool = False,
    generates: bool = False,
    check: "Callable[[BuddyForCausalLM], object]" = lambda outline: None,
) -> Iterator[EvalRun]:
    """Load the model, open the log and a progress bar; interrupted, say how to go on.

    Args:
        compared: The model, and the policies and budgets to compare: by default its own policy at
            full depth.
        config: All settings that samples depend on, and `limit`.
        auto: Whether the Budget Predictor may choose: what is measured are prompts.
        means: Whether the ledger may: what is measured are answers.
        thinking: Whether thinking may have a budget: all that is measured is generated.
        generates: Whether text is decoded, so that the engine has a part in it.
        check: Refuses what this model cannot do, before its weights are fetched.

    Raises:
        BuddyError: The model, a policy or a budget is no good, or the log is another run's.
    """
    from buddy.checkpoint.resolve import resolve
    from buddy.cli.views.bars import Bars
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.lab.evaluation.conditions import plan_conditions
    from buddy.lab.evaluation.samples import SampleLog

    console = stderr()
    asked = (compared.policy or (), compared.budget or ("1.0",))
    forms: dict[str, Any] = {"auto": auto, "means": means, "thinking": thinking}

    def check_all(outline: "BuddyForCausalLM") -> None:
        check(outline)
        plan_conditions(outline, *asked, **forms)

    resolved = resolve(compared.model)
    loaded = load_checked(resolved, check_all, console, ExecutionOptions(dtype=compared.dtype))
    if not generates:
        say_if_slow(loaded, console)
    tokenizer = resolved.load_tokenizer()
    conditions = plan_conditions(loaded, *asked, **forms)
    with fetch_progress(console) as on_progress:
        for condition in conditions:
            condition.prepare(on_progress)
    identity = _identity(loaded, tokenizer, config, generates=generates)
    with (
        alone(compared.out) if launched().is_writer else nullcontext(),
        SampleLog(compared.out.with_suffix(".samples.jsonl"), identity, launched()) as log,
        Bars(console) as bar,
    ):
        if log.num_samples:
            bar.console.print(f"going on from {log.num_samples} samples in {log.path}", style="dim")
        task = bar.add_task("", total=None)
        try:
            for condition in conditions:
                log.declare({**condition.describe(), "key": condition.key})
            settings = {"model": compared.model, "dtype": str(loaded.dtype), **config}
            yield EvalRun(compared.out, loaded, tokenizer, conditions, log, bar, task, settings)
        except KeyboardInterrupt:
            bar.stop()
            console.print(
                f"interrupted: {log.num_samples} samples are kept in {log.path}; the same command "
                "goes on"
            )
            raise typer.Exit(130) from None


def _identity(
    model: "BuddyForCausalLM", tokenizer: Any, config: dict[str, Any], *, generates: bool
) -> dict[str, Any]:
    """All that samples depend on; `limit` is none of it, as more of the same kind may follow."""
    return {
        **{name: value for name, value in config.items() if name != "limit"},
        **computed_by(model),
        "kv_policy": config.get("kv_policy") or model.kv_policy,
        "engine": model.executor.name if generates else None,
        "tokenizer": _tokenizer_mark(tokenizer),
    }


def _tokenizer_mark(tokenizer: Any) -> str:
    """SHA-256 of what turns texts into tokens, and requests into prompts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # some are written in Python
    vocabulary = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    parts = [vocabulary, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def save_record(run: EvalRun, kind: str, results: dict[str, Any]) -> None:
    """Write the record; its path goes to stdout.

    Raises:
        ResultError: It cannot be written; the samples are kept.
    """
    from buddy.records import RunRecord

    if not launched().is_writer:
        return
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
        record.save(run.out)
    except BuddyError as error:
        raise ResultError(
            f"{error}; all {run.log.num_samples} samples are kept in {run.log.path}: the same "
            "command writes the record without measuring again"
        ) from error
    sys.stdout.write(f"{run.out}\n")


def show_points(
    console: "Console", points: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]]
) -> None:
    """A table: one row a condition, one column a (task, metric); shares as percent."""
    from buddy.cli.views.tables import name_column, plain_table, show_table

    table = plain_table()
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
        budget = str(point.get("budget", "")).replace(" blocks", "")
        blocks = budget if is_free else str(point["blocks"])
        row = rows.setdefault((point["label"], blocks), {})
        row[point["task"], point["metric"]] = point
    for (label, blocks), row in rows.items():
        cells = [
            _cell(row[column], bare=column in bare) if column in row else "" for column in columns
        ]
        table.add_row(label, blocks, *cells)
    show_table(console, table)


def show_differences(console: "Console", points: Sequence[dict[str, Any]], against: Path) -> None:
    """A table: one row a condition, what it is compared with and a task."""
    from buddy.cli.views.tables import plain_table, show_table

    table = plain_table(title=f"less {against.name}, row by row")
    names = list(dict.fromkeys(point["metric"] for point in points))
    for name in ("policy", "less", "blocks", "task", *names, "rows"):
        right = name in ("blocks", "rows", *names)
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    rows: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for point in points:
        what = tuple(str(point[name]) for name in ("label", "minus", "blocks", "task"))
        rows.setdefault(what, {})[point["metric"]] = point
    for row, by_metric in rows.items():
        samples = next(iter(by_metric.values()))["samples"]
        cells = (_difference(by_metric[name]) if name in by_metric else "" for name in names)
        table.add_row(*row, *cells, str(samples))
    show_table(console, table)


def show_kept(console: "Console", kept: Sequence[dict[str, Any]]) -> None:
    """A table: one row a condition and a task, with what is kept of full depth."""
    from buddy.cli.views.tables import name_column, plain_table, show_table

    table = plain_table(title="kept of full depth, of the same weights")
    name_column(table, "policy")
    for name in ("blocks", "task", "metric", "full depth", "kept %"):
        is_text = name in ("task", "metric")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for point in kept:
        blocks = f"{point.get('mean_blocks', point['blocks']):.4g}"
        what = (point["label"], blocks, point["task"], point["metric"])
        figures = {name: point[name] for name in ("metric", "value", "stderr")}
        share = "-" if point["value"] is None else _cell(figures, bare=False)
        table.add_row(*what, f"{100 * point['full_depth']:.1f}", share)
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
