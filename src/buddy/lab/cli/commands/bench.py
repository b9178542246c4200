"""`buddy bench`: how fast a model is by budget, and where its time goes."""

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.budget.request import BudgetRequest, read_budget
from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import BUDGETS, offer, policies
from buddy.hub.presets import ROUTED_MODEL
from buddy.settings import Range

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from buddy.lab.evaluation.conditions import Condition
    from buddy.lab.evaluation.speed.speed import SpeedConfig
    from buddy.model import BuddyForCausalLM

_BUDGETS: Any = ["1.0", "0.875", "0.75", "0.625", "0.5"]


Budgets = Annotated[
    list[BudgetRequest],
    options.read_by(
        read_budget,
        "--budget",
        "-b",
        help="Share of the blocks to run; repeat for several.",
        autocompletion=offer(*BUDGETS[:5]),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerOptions:
    """What executes the blocks, and how they are chosen."""

    kv_policy: options.KVPolicy = None
    reroute: options.Reroute = "step"
    batch_route: Annotated[
        str, typer.Option(help="Rank blocks for each row (independent) or once for all (shared).")
    ] = "independent"
    engine: options.Engine = "auto"
    quant: options.Quant = None
    dtype: options.Dtype = None
    threads: Annotated[
        int | None,
        options.number(Range(1, 1024), help="CPU threads; torch's choice if not given."),
    ] = None

    def execution(self) -> options.ExecutionOptions:
        """What a model is loaded with; policies come later, one after the other."""
        return options.ExecutionOptions(
            kv_policy=self.kv_policy, engine=self.engine, quant=self.quant, dtype=self.dtype
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """What is timed, and how often."""

    context: Annotated[
        int, options.count(1, "--tokens", "--context", help="Tokens of a prompt.")
    ] = 256
    new_tokens: Annotated[
        int,
        options.count(
            2, "--max-new-tokens", "--max-tokens", "--new-tokens", help="Tokens of an answer."
        ),
    ] = 64
    batch: Annotated[int, options.count(1, help="Prompts at a time.")] = 1
    rounds: Annotated[int, options.count(1, help="Rounds after one that warms up.")] = 5
    text: Annotated[
        str | None,
        typer.Option(help="Prompts: wikitext2, ptb or a text file; random tokens if not given."),
    ] = None
    data_dir: options.DataDir = None
    seed: Annotated[int, options.seed("Seed of random prompts and of the order of runs.")] = 0
    transformers: Annotated[
        bool,
        typer.Option("--transformers/--no-transformers", help="Time transformers' own generate."),
    ] = True

    def describe(self, batches: int) -> dict[str, Any]:
        """What the record says of the prompts, which fill so many batches."""
        return {
            "context": self.context,
            "batch": self.batch,
            "prompts": "random token ids" if self.text is None else self.text,
            "distinct_prompts": self.batch * batches,
        }


@options.on_device
@options.grouped
def bench(
    out: options.RecordOut,
    model: options.Model = ROUTED_MODEL,
    budget: Budgets = _BUDGETS,
    policy: Policies = None,
    *,
    runner: RunnerOptions,
    workload: WorkloadOptions,
) -> None:
    """Time prefill and decode by budget, and what takes the time.

    Full depth is always timed, and transformers' own generate on the same weights. Speed-ups are
    medians of ratios taken within a round.

    Example: `buddy bench -b 1.0 -b 0.5 --out speed.json`
    """
    import torch

    from buddy.cli.loading import load_checked
    from buddy.cli.views.display import fetch_progress, prepare_engine, stderr
    from buddy.engine.executors.choice import describe_engine
    from buddy.importance.calibration import read_text
    from buddy.lab.cli.views.speed_table import show_speed
    from buddy.lab.evaluation.conditions import plan_conditions
    from buddy.lab.evaluation.speed.speed import check_context
    from buddy.records import RunRecord

    text = None if workload.text is None else read_text(workload.text, workload.data_dir)
    config, console = _config(runner, workload), stderr()
    if runner.threads is not None:
        torch.set_num_threads(runner.threads)

    def check(outline: "BuddyForCausalLM") -> None:
        plan_conditions(outline, policy or [], budget)
        check_context(outline, workload.context, workload.new_tokens)

    loaded = load_checked(model, check, console, runner.execution())
    if loaded.origin.quant is not None:  # transformers would widen such weights at each step
        config = replace(config, transformers=False)
    conditions = plan_conditions(loaded, policy or [], budget)
    with fetch_progress(console) as on_progress:
        for condition in conditions:
            condition.prepare(on_progress)
    prompts = _prompts(loaded, model, text, workload)
    prepare_engine(console, loaded.executor)
    results = _measure(loaded, conditions, prompts, config, console)
    who_ran = _who_ran(loaded, results, workload.batch)
    settings = {
        "model": model,
        **_setting(loaded),
        **who_ran,
        **asdict(config),
        "policies": list(dict.fromkeys(condition.spec for condition in conditions)),
        "budgets": [request.text for request in budget],
        **workload.describe(len(prompts)),
    }
    RunRecord(kind="eval-speed", model=loaded.facts(), config=settings, results=results).save(out)
    more = who_ran["engine_reason"] or loaded.executor.instructions
    show_speed(console, results, describe_engine(who_ran["engine"], more))
    sys.stdout.write(f"{out}\n")


def _config(runner: RunnerOptions, workload: WorkloadOptions) -> "SpeedConfig":
    from buddy.engine.run import check_reroute
    from buddy.engine.steer import check_batch_route
    from buddy.lab.evaluation.speed.speed import SpeedConfig

    return SpeedConfig(
        new_tokens=workload.new_tokens,
        rounds=workload.rounds,
        reroute=check_reroute(options.parse_reroute(runner.reroute)),
        batch_route=check_batch_route(runner.batch_route),
        transformers=workload.transformers,
        seed=workload.seed,
    )


def _prompts(
    model: "BuddyForCausalLM", name: str, text: str | None, workload: WorkloadOptions
) -> "Tensor":
    """Token ids [rounds, batch, context]; of a short text, fewer rounds."""
    import torch

    if text is not None:
        return _text_prompts(name, text, workload)
    shape = (workload.rounds, workload.batch, workload.context)
    generator = torch.Generator().manual_seed(workload.seed)
    return torch.randint(model.config.vocab_size, shape, generator=generator)


def _text_prompts(model: str, text: str, workload: WorkloadOptions) -> "Tensor":
    """Token ids of the batches that the text fills, at most one a round."""
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.errors import ResultError
    from buddy.importance.calibration import cut_windows

    batch, context = workload.batch, workload.context
    most = workload.rounds * batch
    windows = cut_windows(load_tokenizer(model), text, tokens=context, limit=most)
    full = len(windows) // batch
    if full == 0:
        raise ResultError(
            f"the text fills {len(windows)} prompts of {context} tokens, expected at "
            f"least the {batch} of a batch: give more text, or ask for less"
        )
    return windows[: full * batch].view(full, batch, context)


def _setting(model: "BuddyForCausalLM") -> dict[str, Any]:
    """What else speed depends on."""
    import torch

    devices = list(dict.fromkeys(model.backbone.devices))
    names = map(torch.cuda.get_device_name, devices) if model.device.type == "cuda" else ()
    return {
        "dtype": str(model.dtype),
        "device": ", ".join(names) or model.device.type,
        "threads": torch.get_num_threads(),
        "instructions": model.executor.instructions,
        "attention": model.backbone.attention,
        "kv_policy": model.kv_policy,
        "quant": model.origin.quant,
        "prior": model.prior_facts,
    }


def _who_ran(model: "BuddyForCausalLM", results: dict[str, Any], batch: int) -> dict[str, Any]:
    """Who ran decode steps, and why that was not the fast path, or not for all."""
    rows = [row for row in results["rounds"] if row["engine"] is not None]
    ran, fast = {row["engine"] for row in rows}, model.executor.name
    reason = model.executor.why_general
    if ran != {fast}:
        others = " and ".join(row["name"] for row in rows if row["engine"] != fast)
        what = f"steps of {others}" if fast in ran else f"steps of {batch} new tokens"
        reason = f"the {fast} engine takes no {what}"
    return {"engine": " and ".join(sorted(ran)), "engine_reason": reason}


def _measure(
    model: "BuddyForCausalLM",
    conditions: list["Condition"],
    prompts: "Tensor",
    config: "SpeedConfig",
    console: "Console",
) -> dict[str, Any]:
    from buddy.cli.views.bars import stoppable_bars
    from buddy.lab.evaluation.speed.speed import measure_speed

    farewell = "interrupted: too few rounds to compare, so no record was written"
    with stoppable_bars(console, farewell) as bars:
        return measure_speed(model, conditions, prompts, config, on_pass=bars.counter("Timing"))


COMMAND = Command(name="bench", group="measure", place=3, run=bench)
