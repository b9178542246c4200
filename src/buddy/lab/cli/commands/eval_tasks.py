"""`buddy eval tasks`, `gsm8k` and `mmlu`: lm-evaluation-harness under budgets."""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.lab.cli import eval_run
from buddy.settings import Range

if TYPE_CHECKING:
    from buddy.lab.evaluation.tasks.harness import BuddyLM

Batch = Annotated[int, options.count(1, help="Questions or prompts at a time.")]
# numpy, which lm-eval draws with, takes no larger one.
Seed = Annotated[int, options.number(Range(0, 2**32 - 1), help="Seed of few-shot sampling.")]
Fewshot = Annotated[
    int | None,
    options.count(0, help="Examples in each prompt; the task's own number if not given."),
]
ChatTemplate = Annotated[
    bool, typer.Option("--chat-template", help="Put prompts into the model's chat template.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionOptions:
    """Which questions are asked, and how."""

    data_dir: eval_run.DataDir = None
    limit: eval_run.Limit = None
    fewshot: Fewshot = None
    chat_template: ChatTemplate = False
    kv_policy: options.KVPolicy = None
    batch: Batch = 16
    against: eval_run.AgainstLog = None
    seed: Seed = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class MathsOptions(QuestionOptions):
    """The same; answers are long."""

    batch: Batch = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SubjectOptions(QuestionOptions):
    """The same; the limit is one of each subject."""

    limit: Annotated[
        int | None, options.count(1, help="Most questions of each subject. All if not given.")
    ] = None


@options.on_device
@options.grouped
def tasks(
    *,
    compared: eval_run.EvalOptions,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Repeat for several; the eight commonsense tasks if not given."),
    ] = None,
    questions: QuestionOptions,
    route_on: eval_run.RouteOn = "prompt",
    reroute: options.Reroute = "step",
) -> None:
    """Accuracy on tasks of lm-evaluation-harness, at several budgets.

    Each question is routed from its context alone, and all its candidate answers share the route.
    Interrupted, the same command goes on where it stopped.

    Example: `buddy eval tasks --task piqa -b 1.0 -b 0.75 --out tasks.json`
    """
    _evaluate("eval-tasks", task or [], compared, questions, route_on=route_on, reroute=reroute)


@options.on_device
@options.grouped
def gsm8k(
    *,
    compared: eval_run.EvalOptions,
    questions: MathsOptions,
    reroute: options.Reroute = "step",
) -> None:
    """Grade-school mathematics: exact match of the final number.

    Example: `buddy eval gsm8k -b 1.0 -b 0.75 --limit 100 --out gsm8k.json`
    """
    _evaluate("eval-gsm8k", ["gsm8k"], compared, questions, reroute=reroute)


@options.on_device
@options.grouped
def mmlu(
    *,
    compared: eval_run.EvalOptions,
    questions: SubjectOptions,
    route_on: eval_run.RouteOn = "prompt",
) -> None:
    """Multiple choice over 57 subjects, averaged over all rows.

    Example: `buddy eval mmlu -b 1.0 -b 0.75 --limit 10 --out mmlu.json`
    """
    _evaluate("eval-mmlu", ["mmlu"], compared, questions, route_on=route_on)


def _evaluate(
    kind: str,
    names: list[str],
    compared: eval_run.EvalOptions,
    questions: QuestionOptions,
    *,
    route_on: str = "prompt",
    reroute: str = "step",
) -> None:
    quiet()
    from buddy.lab.evaluation.against import Against
    from buddy.lab.evaluation.tasks.extra import require_lm_eval

    require_lm_eval()
    from buddy.lab.commonsense import COMMONSENSE
    from buddy.lab.evaluation.tasks.loading import check_answers, load_tasks, longest_answers
    from buddy.lab.evaluation.tasks.tasks import run_tasks

    names, against = names or list(COMMONSENSE), questions.against
    earlier = None if against is None else Against(against)
    loaded = load_tasks(
        names, data_dir=questions.data_dir, fewshot=questions.fewshot, limit=questions.limit
    )
    longest = longest_answers(loaded["tasks"])
    with eval_run.eval_run(
        compared,
        _config(names, questions, route_on, reroute),
        auto=True,
        generates=longest > 0,
        check=lambda outline: check_answers(outline, longest),
    ) as run:
        run.config["against"] = None if earlier is None else earlier.describe()
        lm = _lm(run, questions, route_on, reroute)
        most = questions.limit or 10**9
        rows = sum(min(len(task.eval_docs), most) for task in loaded["tasks"].values())
        run.total(rows * len(run.conditions))
        results = run_tasks(
            lm,
            run.conditions,
            loaded,
            limit=questions.limit,
            seed=questions.seed,
            chat_template=questions.chat_template,
            against=earlier,
            on_condition=run.show,
        )
    columns = _columns(results["points"])
    eval_run.show_points(run.console, results["points"], columns)
    kept = [point for point in results["kept"] if (point["task"], point["metric"]) in columns]
    if kept:
        eval_run.show_kept(run.console, kept)
    if against is not None:
        eval_run.show_differences(run.console, results["against"], against)
    eval_run.save_record(run, kind, results)


def _lm(
    run: eval_run.EvalRun, questions: QuestionOptions, route_on: str, reroute: str
) -> "BuddyLM":
    """The model as lm-eval asks it, which keeps its samples in the log of the run."""
    from buddy.lab.evaluation.tasks.harness import BuddyLM

    return BuddyLM(
        run.model,
        tokenizer=run.tokenizer,
        route_on=route_on,
        reroute=options.parse_reroute(reroute),
        kv_policy=questions.kv_policy,
        batch_size=questions.batch,
        log=run.log,
        on_sample=run.advance,
    )


def _config(
    names: list[str], questions: QuestionOptions, route_on: str, reroute: str
) -> dict[str, Any]:
    """All settings that samples depend on, and the limit."""
    return {
        "tasks": names,
        "data": "hub" if questions.data_dir is None else "local",
        "limit": questions.limit,
        "fewshot": questions.fewshot,
        "chat_template": questions.chat_template,
        "route_on": route_on,
        "reroute": reroute,
        "kv_policy": questions.kv_policy,
        "batch": questions.batch,
        "seed": questions.seed,
    }


def _columns(points: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Tasks and metrics that are shown: of a commonsense task its own, of MMLU the average."""
    from buddy.lab.commonsense import COMMONSENSE

    columns = dict.fromkeys((point["task"], point["metric"]) for point in points)
    return [
        (task, metric)
        for task, metric in columns
        if COMMONSENSE.get(task, metric) == metric and not task.startswith("mmlu_")
    ]


def quiet() -> None:
    """Our progress bar and messages speak for those of lm-eval and of the hub's client."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # no lines about each new try
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
