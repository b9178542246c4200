"""`buddy eval answers`: cross-entropy of answers to instructions, at several budgets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from buddy.cli import options
from buddy.errors import DataError
from buddy.lab.cli import eval_run

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Which rows of the file are asked, and how."""

    start: Annotated[int, options.count(0, help="First row.")] = 0
    limit: Annotated[int | None, options.count(1, help="Most rows. All if not given.")] = None
    stop: Annotated[
        int | None,
        options.count(1, help="First row that is left out: --limit's old form.", hidden=True),
    ] = None
    template: Annotated[str, typer.Option(help="How an instruction is put: chat or alpaca.")] = (
        "chat"
    )
    max_tokens: Annotated[
        int | None,
        options.count(
            2,
            "--tokens",
            "--max-tokens",
            help="Most tokens of prompt and answer together. 1024, or the model's context if "
            "shorter, if not given.",
        ),
    ] = None

    @property
    def end(self) -> int | None:
        """The first row that is left out; None where all are taken.

        Raises:
            DataError: It is named in two ways.
        """
        if self.limit is not None and self.stop is not None:
            raise DataError("--limit and --stop both say where rows end: leave one out")
        return self.stop if self.limit is None else self.start + self.limit

    def longest(self, model: Any) -> int:
        """The most tokens of a prompt and its answer, on a model.

        Raises:
            DataError: The model's context is shorter.
        """
        context, asked = model.config.max_position_embeddings, self.max_tokens
        if asked is not None and asked > context:
            raise DataError(f"--tokens must be at most {context}, the model's context, got {asked}")
        return asked or min(_DEFAULT_TOKENS, context)


@options.on_device
@options.grouped
def answers(
    file: Annotated[
        str,
        typer.Argument(
            help="JSON or JSON lines: instruction and output, or prompt and completion."
        ),
    ],
    *,
    compared: eval_run.EvalOptions,
    rows: RowOptions,
    shuffle_plans: Annotated[
        int | None,
        options.count(
            0, metavar="SEED", help="Also give each input another input's plan: what it costs."
        ),
    ] = None,
    against: eval_run.AgainstLog = None,
    batch: Annotated[int, options.count(1, help="Answers at a time.")] = 16,
) -> None:
    """Cross-entropy of answers, given their prompts, in nats a token.

    Each answer is routed from its prompt alone. Interrupted, the same command goes on where it
    stopped; --start, --limit, --shuffle-plans and --against may change.

    Example: `buddy eval answers shipped:mix -b 0.75 --out answers.json`
    """
    from buddy.data.examples import Source, check_source, read_examples
    from buddy.lab.evaluation.against import Against
    from buddy.lab.evaluation.answers.answers import rounds_of, run_answers

    source = Source(path=file, start=rows.start, stop=rows.end, template=cast(Any, rows.template))
    check_source(source)
    earlier = None if against is None else Against(against)
    config = {"template": rows.template, "max_tokens": rows.max_tokens, "batch": batch}
    with eval_run.eval_run(compared, config, means=True, check=rows.longest) as run:
        run.config |= {"file": file, "start": rows.start, "stop": rows.end}
        run.config |= {"shuffle_plans": shuffle_plans}
        run.config["against"] = None if earlier is None else earlier.describe()
        left_out: list[str] = []
        examples = read_examples(
            source, run.tokenizer, max_tokens=rows.longest(run.model), note=left_out.append
        )
        run.tell_left_out(left_out)
        shuffles = shuffle_plans is not None
        run.total(sum(len(examples) * rounds_of(c, shuffle=shuffles) for c in run.conditions))
        results = run_answers(
            run.model,
            run.conditions,
            examples,
            batch=batch,
            shuffle_seed=shuffle_plans,
            log=run.log,
            against=earlier,
            on_answers=run.count,
        )
    _show(run.console, results)
    if against is not None:
        eval_run.show_differences(run.console, results["against"], against)
    eval_run.save_record(run, "eval-answers", results)


def _show(console: "Console", results: dict[str, Any]) -> None:
    """One row a condition: the loss of all answers, and what another input's plan costs."""
    from rich.table import Table

    from buddy.cli.views.tables import name_column, show_table

    table = Table(box=None, header_style="dim", pad_edge=False, collapse_padding=True)
    name_column(table, "policy")
    names = ["nats a\ntoken", "mean of\nanswers", "plans"]
    if results["exchanged"]:
        names += ["plan of\nanother", "of another,\nsame source"]
    for name in ["blocks", *names]:
        table.add_column(name, justify="right", no_wrap=True)
    figures = {
        (*_condition(point), point["metric"], point.get("within")): point
        for point in [*results["points"], *results["exchanged"]]
        if point["task"] == "all"
    }
    for entry in results["execution"]:
        if entry["task"] != "all":
            continue
        label, blocks = _condition(entry)
        losses = [figures[label, blocks, metric, None] for metric in ("nll", "answer_nll")]
        exchanged = [figures.get((label, blocks, "nll", within)) for within in ("all", "source")]
        cells = [*map(_nats, losses), str(entry["distinct_plans"])]
        if results["exchanged"]:
            cells += ["" if point is None else _nats(point, sign="+") for point in exchanged]
        table.add_row(label, _depth(entry), *cells)
    show_table(console, table)


def _depth(entry: dict[str, Any]) -> str:
    """The budget, or the mean over tokens or prompts where that is no whole number."""
    mean = entry.get("mean_blocks", entry["blocks"])
    return f"{mean:.1f}" if mean != entry["blocks"] else str(entry["blocks"])


def _condition(entry: dict[str, Any]) -> tuple[str, int]:
    return entry["label"], entry["blocks"]


def _nats(point: dict[str, Any], *, sign: str = "") -> str:
    error = "" if point["stderr"] is None else f"±{point['stderr']:.3f}"
    return f"{point['value']:{sign}.3f}{error}"
