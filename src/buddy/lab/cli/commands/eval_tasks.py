"""`buddy eval tasks`, `gsm8k` and `mmlu`: lm-evaluation-harness under budgets."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from buddy.budget.request import BudgetRequest
from buddy.cli import options
from buddy.hub.presets import DEFAULT_MODEL
from buddy.lab.cli import eval_run
from buddy.settings import Range

Batch = Annotated[int, options.count(1, help="Questions or prompts at a time.")]
# numpy, which lm-eval draws with, takes no larger one.
Seed = Annotated[int, options.number(Range(0, 2**32 - 1), help="Seed of few-shot sampling.")]
Fewshot = Annotated[
    int | None, options.count(0, help="Examples in each prompt; the task's own number if none.")
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="Put prompts into the model's chat template.")
]


def tasks(
    out: eval_run.Out,
    model: options.Model = DEFAULT_MODEL,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Repeat for several; the eight commonsense tasks if none."),
    ] = None,
    budget: eval_run.Budgets = None,
    policy: eval_run.Policies = None,
    data_dir: eval_run.DataDir = None,
    limit: eval_run.Limit = None,
    fewshot: Fewshot = None,
    chat_template: ChatTemplate = False,
    route_on: eval_run.RouteOn = "prompt",
    reroute: options.Reroute = "step",
    kv_policy: options.KVPolicy = None,
    batch: Batch = 16,
    dtype: options.Dtype = None,
    against: eval_run.AgainstLog = None,
    seed: Seed = 1234,
) -> None:
    """Accuracy on tasks of lm-evaluation-harness, at several budgets.

    Each question is routed from its context alone, and all its candidate answers share the route.
    Interrupted, the same command goes on where it stopped.
    """
    _evaluate("eval-tasks", task or [], **_settings(locals()))


def gsm8k(
    out: eval_run.Out,
    model: options.Model = DEFAULT_MODEL,
    budget: eval_run.Budgets = None,
    policy: eval_run.Policies = None,
    data_dir: eval_run.DataDir = None,
    limit: eval_run.Limit = None,
    fewshot: Fewshot = None,
    chat_template: ChatTemplate = False,
    reroute: options.Reroute = "step",
    kv_policy: options.KVPolicy = None,
    batch: Batch = 8,
    dtype: options.Dtype = None,
    against: eval_run.AgainstLog = None,
    seed: Seed = 1234,
) -> None:
    """Grade-school mathematics: exact match of the final number."""
    _evaluate("eval-gsm8k", ["gsm8k"], route_on="prompt", **_settings(locals()))


def mmlu(
    out: eval_run.Out,
    model: options.Model = DEFAULT_MODEL,
    budget: eval_run.Budgets = None,
    policy: eval_run.Policies = None,
    data_dir: eval_run.DataDir = None,
    limit: Annotated[int | None, options.count(1, help="Rows of each subject.")] = None,
    fewshot: Fewshot = None,
    chat_template: ChatTemplate = False,
    route_on: eval_run.RouteOn = "prompt",
    kv_policy: options.KVPolicy = None,
    batch: Batch = 16,
    dtype: options.Dtype = None,
    against: eval_run.AgainstLog = None,
    seed: Seed = 1234,
) -> None:
    """Multiple choice over 57 subjects, averaged over all rows."""
    _evaluate("eval-mmlu", ["mmlu"], reroute="step", **_settings(locals()))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "task"}


def _evaluate(
    kind: str,
    names: list[str],
    *,
    out: Path,
    model: str,
    budget: list[BudgetRequest] | None,
    policy: list[str] | None,
    data_dir: Path | None,
    limit: int | None,
    fewshot: int | None,
    chat_template: bool,
    route_on: str,
    reroute: str,
    kv_policy: str | None,
    batch: int,
    dtype: str | None,
    against: Path | None,
    seed: int,
) -> None:
    quiet()
    from buddy.lab.evaluation.against import Against
    from buddy.lab.evaluation.tasks.extra import require_lm_eval

    require_lm_eval()
    from buddy.lab.commonsense import COMMONSENSE
    from buddy.lab.evaluation.tasks.harness import BuddyLM
    from buddy.lab.evaluation.tasks.loading import check_answers, load_tasks, longest_answers
    from buddy.lab.evaluation.tasks.tasks import run_tasks

    names = names or list(COMMONSENSE)
    earlier = None if against is None else Against(against)
    loaded = load_tasks(names, data_dir=data_dir, fewshot=fewshot, limit=limit)
    config = {
        "tasks": names,
        "data": "hub" if data_dir is None else "local",
        "limit": limit,
        "fewshot": fewshot,
        "chat_template": chat_template,
        "route_on": route_on,
        "reroute": reroute,
        "kv_policy": kv_policy,
        "batch": batch,
        "seed": seed,
    }
    longest = longest_answers(loaded["tasks"])
    with eval_run.eval_run(
        model,
        out,
        policies=policy,
        budgets=budget,
        config=config,
        auto=True,
        generates=longest > 0,
        dtype=dtype,
        check=lambda outline: check_answers(outline, longest),
    ) as run:
        lm = BuddyLM(
            run.model,
            tokenizer=run.tokenizer,
            route_on=route_on,
            reroute=options.parse_reroute(reroute),
            kv_policy=kv_policy,
            batch_size=batch,
            log=run.log,
            on_sample=run.advance,
        )
        run.config["against"] = None if earlier is None else earlier.describe()
        rows = sum(min(len(one.eval_docs), limit or 10**9) for one in loaded["tasks"].values())
        run.total(rows * len(run.conditions))
        results = run_tasks(
            lm,
            run.conditions,
            loaded,
            limit=limit,
            seed=seed,
            chat_template=chat_template,
            against=earlier,
            on_condition=run.show,
        )
    columns = dict.fromkeys((one["task"], one["metric"]) for one in results["points"])
    shown = [
        (task, metric)
        for task, metric in columns
        if COMMONSENSE.get(task, metric) == metric and not task.startswith("mmlu_")
    ]
    eval_run.show_points(run.console, results["points"], shown)
    if against is not None:
        eval_run.show_differences(run.console, results["against"], against)
    eval_run.save_record(run, kind, out, results)


def quiet() -> None:
    """Our progress bar and messages speak for those of lm-eval and of the hub's client."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # no lines about each new try
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
