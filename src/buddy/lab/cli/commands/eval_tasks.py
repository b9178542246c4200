"""`buddy eval tasks`, `gsm8k` and `mmlu`: lm-evaluation-harness under budgets."""

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.template_option import TemplateOptions, template_variables
from buddy.errors import PolicyError, PromptError
from buddy.lab.cli import eval_run
from buddy.lab.cli.thinking import Thinking
from buddy.settings import Range

if TYPE_CHECKING:
    from buddy.lab.evaluation.tasks.harness import BuddyLM
    from buddy.model import BuddyForCausalLM

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
    template_options: TemplateOptions = None
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
    thinking_tokens: options.ThinkingTokens = None,
) -> None:
    """Accuracy on tasks of lm-evaluation-harness, at several budgets.

    Each question is routed from its context alone, and all its candidate answers share the route.
    Interrupted, the same command goes on where it stopped.

    Example: `buddy eval tasks --task piqa -b 1.0 -b 0.75 --out tasks.json`
    """
    routing = {"route_on": route_on, "reroute": reroute}
    _evaluate("eval-tasks", task or [], compared, questions, routing, thinking_tokens)


@options.on_device
@options.grouped
def gsm8k(
    *,
    compared: eval_run.EvalOptions,
    questions: MathsOptions,
    reroute: options.Reroute = "step",
    thinking_tokens: options.ThinkingTokens = None,
) -> None:
    """Grade-school mathematics: exact match of the final number.

    Of a model that thinks aloud, the answer is what follows its thinking.

    Example: `buddy eval gsm8k -b 1.0 -b 0.75 --limit 100 --out gsm8k.json`
    """
    routing = {"route_on": "prompt", "reroute": reroute}
    _evaluate("eval-gsm8k", ["gsm8k"], compared, questions, routing, thinking_tokens)


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
    routing = {"route_on": route_on, "reroute": "step"}
    _evaluate("eval-mmlu", ["mmlu"], compared, questions, routing)


def _evaluate(
    kind: str,
    names: list[str],
    compared: eval_run.EvalOptions,
    questions: QuestionOptions,
    routing: dict[str, str],
    thinking_tokens: int | None = None,
) -> None:
    variables = template_variables(questions.template_options)
    if variables and not questions.chat_template:
        raise PromptError("--template-option needs --chat-template, which puts prompts into one")
    quiet()
    from buddy.lab.evaluation.against import Against
    from buddy.lab.evaluation.tasks.extra import require_lm_eval

    require_lm_eval()
    from buddy.lab.commonsense import COMMONSENSE
    from buddy.lab.evaluation.tasks import loading
    from buddy.lab.evaluation.tasks.tasks import run_tasks

    names, against = names or list(COMMONSENSE), questions.against
    earlier = None if against is None else Against(against)
    eval_run.tell_of_hub(", ".join(names), questions.data_dir)
    loaded = loading.load_tasks(
        names, data_dir=questions.data_dir, fewshot=questions.fewshot, limit=questions.limit
    )
    longest, scored = loading.longest_answers(loaded["tasks"]), loading.scored(loaded["tasks"])
    thinking = Thinking(thinking_tokens, variables)
    if scored and thinking_tokens is not None:
        raise PolicyError(
            f"--thinking-tokens is for what a model writes, and task {scored[0]} scores answers "
            "that are given: leave it out, or name tasks that generate, such as gsm8k"
        )

    def check(outline: "BuddyForCausalLM") -> None:
        loading.check_answers(outline, longest)
        thinking.check(outline, compared.model)

    with eval_run.eval_run(
        compared,
        {**_config(names, questions), **routing, **thinking.config},
        auto=True,
        thinking=not scored,
        generates=longest > 0,
        check=check,
    ) as run:
        run.config["against"] = None if earlier is None else earlier.describe()
        lm = _lm(run, questions, routing, thinking)
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
    run: eval_run.EvalRun,
    questions: QuestionOptions,
    routing: dict[str, str],
    thinking: Thinking,
) -> "BuddyLM":
    """The model as lm-eval asks it, which keeps its samples in the log of the run."""
    from buddy.lab.evaluation.tasks.harness import BuddyLM

    return BuddyLM(
        run.model,
        tokenizer=run.tokenizer,
        route_on=routing["route_on"],
        reroute=options.parse_reroute(routing["reroute"]),
        kv_policy=questions.kv_policy,
        thinking_tokens=thinking.tokens,
        # As everywhere, no thinking where nobody asks for it.
        chat_template_args={"enable_thinking": False, **thinking.variables},
        think_end_token=thinking.end(run.model),
        batch_size=questions.batch,
        log=run.log,
        on_sample=run.advance,
    )


def _config(names: list[str], questions: QuestionOptions) -> dict[str, Any]:
    """All settings that samples depend on but the route's, and the limit."""
    return {
        "tasks": names,
        "data": "hub" if questions.data_dir is None else "local",
        "limit": questions.limit,
        "fewshot": questions.fewshot,
        "chat_template": questions.chat_template,
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
