"""`buddy eval rouge`: summaries at several budgets, the route recomputed or reused."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from buddy.cli import options
from buddy.cli.loading import check_room
from buddy.cli.template_option import TemplateOptions, template_variables
from buddy.lab.cli import eval_run
from buddy.lab.cli.thinking import Thinking

if TYPE_CHECKING:
    from rich.console import Console


@options.on_device
@options.grouped
def rouge(
    *,
    compared: eval_run.EvalOptions,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with samsum/SPLIT.jsonl; the hub if not given."),
    ] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "validation",
    limit: Annotated[
        int | None, options.count(1, help="Most dialogues, drawn at random. All if not given.")
    ] = None,
    seed: Annotated[int, options.seed("Seed of the draw.")] = 0,
    max_new_tokens: options.MaxNewTokens = 100,
    thinking_tokens: options.ThinkingTokens = None,
    template_options: TemplateOptions = None,
    kv_policy: options.KVPolicy = None,
    batch: Annotated[int, options.count(1, help="Dialogues at a time.")] = 8,
) -> None:
    """ROUGE of SAMSum summaries, routed by each token or the prompt.

    The route is recomputed at every token, or reused from the prompt. Both ways answer the same
    dialogues, and their difference is taken answer by answer. Of a model that thinks aloud, the
    summary is what follows its thinking. Interrupted, the same command goes on
    where it stopped.

    Example: `buddy eval rouge -b 0.875 --limit 100 --out rouge.json`
    """
    from buddy.lab.evaluation.rouge.rouge import RougeConfig, ask_all, rouge_scorer, run_rouge
    from buddy.lab.evaluation.rouge.rouge_points import ways_of
    from buddy.lab.evaluation.rouge.samsum import HUB_ID, INSTRUCTION, has_chat, read_dialogues

    thinking = Thinking(thinking_tokens, template_variables(template_options))
    score = rouge_scorer()
    settings = RougeConfig(
        batch=batch,
        max_new_tokens=max_new_tokens,
        kv_policy=cast(Any, kv_policy),
        thinking_tokens=thinking_tokens,
    )
    left_out: list[str] = []
    eval_run.tell_of_hub(HUB_ID, data_dir)
    dialogues = read_dialogues(data_dir, split, limit=limit, seed=seed, note=left_out.append)
    config = {
        "data": HUB_ID if data_dir is None else "local",
        "split": split,
        "limit": limit,
        "seed": seed,
        "instruction": INSTRUCTION,
        "decoding": "greedy",
        "max_new_tokens": max_new_tokens,
        "kv_policy": kv_policy,
        "batch": batch,
        "scorer": "rouge-score, stemmed, F-measure",
        **thinking.config,
    }

    def check(outline: Any) -> None:
        check_room(outline, max_new_tokens)
        thinking.check(outline, compared.model)

    with eval_run.eval_run(
        compared, config, means=True, thinking=True, generates=True, check=check
    ) as run:
        run.tell_left_out(left_out)
        run.config["prompt"] = "chat template" if has_chat(run.tokenizer) else "plain"
        batches = ask_all(run.model, run.tokenizer, dialogues, settings, thinking.variables)
        run.total(len(dialogues) * sum(len(ways_of(condition)) for condition in run.conditions))
        results = run_rouge(
            run.model,
            run.tokenizer,
            run.conditions,
            batches,
            settings,
            score=score,
            thinking_ends=thinking.end(run.model),
            log=run.log,
            on_answers=run.count,
        )
    _show(run.console, results)
    eval_run.save_record(run, "eval-rouge", results)


def _show(console: "Console", results: dict[str, Any]) -> None:
    """One row a condition and way, and the difference of the two below them."""
    from rich import box
    from rich.table import Table

    from buddy.cli.views.tables import name_column, show_table
    from buddy.lab.evaluation.rouge.rouge_points import METRICS, WAYS

    table = Table(
        title="ROUGE F, %", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    name_column(table, "policy")
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column("route", no_wrap=True)
    for metric in METRICS:
        table.add_column(metric.replace("rouge", "ROUGE-"), justify="right", no_wrap=True)
    table.add_column("plans", justify="right", no_wrap=True)
    points, execution = _by_row(results["points"]), iter(results["execution"])
    differences = iter(_by_row(results["differences"]).values())
    for (label, blocks, way), row in points.items():
        plans = f"{next(execution)['distinct_plans_per_answer']:.1f}"
        route = "" if way is None else WAYS[way]
        table.add_row(label, str(blocks), route, *map(_percent, row), plans)
        if way == "prefill":
            gains = [_percent(point, sign="+") for point in next(differences)]
            table.add_row("", "", "difference", *gains, style="dim")
    show_table(console, table)


def _by_row(points: list[dict[str, Any]]) -> dict[tuple[str, int, Any], list[dict[str, Any]]]:
    """Points by condition and way, the metrics in their order."""
    rows: dict[tuple[str, int, Any], list[dict[str, Any]]] = {}
    for point in points:
        row = (point["label"], point["blocks"], point["reroute"])
        rows.setdefault(row, []).append(point)
    return rows


def _percent(point: dict[str, Any], *, sign: str = "") -> str:
    error = "" if point["stderr"] is None else f" ± {100 * point['stderr']:.2f}"
    return f"{100 * point['value']:{sign}.2f}{error}"
