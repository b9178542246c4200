"""`buddy bench`: how fast a model is by budget, and where its time goes."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from buddy.cli import options
from buddy.hub.presets import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from buddy.evaluation.conditions import Condition
    from buddy.evaluation.speed.speed import SpeedConfig
    from buddy.model import BuddyForCausalLM

_BUDGETS = ["1.0", "0.875", "0.75", "0.625", "0.5"]


def bench(
    out: Annotated[Path, typer.Option(help="Where the RunRecord goes (JSON).")],
    model: options.Model = DEFAULT_MODEL,
    budget: Annotated[
        list[str],
        typer.Option("--budget", "-b", help="Share of the blocks to run; repeat for more."),
    ] = _BUDGETS,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="As buddy generate takes it, or NAME=POLICY; repeat for more."),
    ] = None,
    kv_policy: options.KVPolicy = None,
    reroute: options.Reroute = "step",
    batch_route: Annotated[
        str, typer.Option(help="Rank blocks for each row (independent) or once for all (shared).")
    ] = "independent",
    engine: options.Engine = "auto",
    quant: options.Quant = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a generation.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="After one that warms up.")] = 5,
    text: Annotated[
        str | None,
        typer.Option(help="Prompts: wikitext2, ptb or a text file; random tokens if not given."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the named corpora.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Of random prompts and the order of runs.")
    ] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.")
    ] = None,
    transformers: Annotated[
        bool,
        typer.Option("--transformers/--no-transformers", help="Time transformers' own generate."),
    ] = True,
) -> None:
    """Time prefill and decode by budget, and see where the time goes.

    Full depth is always timed, and transformers' own generate on the same weights. Speed-ups are
    medians of ratios taken within a round.
    """
    from buddy.cli.views.display import fetch_progress, stderr
    from buddy.cli.views.speed_table import show_speed
    from buddy.engine.run import check_reroute
    from buddy.engine.steer import check_batch_route
    from buddy.evaluation.conditions import plan_conditions
    from buddy.evaluation.speed.speed import SpeedConfig, check_context
    from buddy.files import check_writable
    from buddy.records import RunRecord

    check_writable(out)
    config = SpeedConfig(
        new_tokens=new_tokens,
        rounds=rounds,
        reroute=check_reroute(cast(Any, options.parse_reroute(reroute))),
        batch_route=check_batch_route(cast(Any, batch_route)),
        transformers=transformers and quant is None,
        seed=seed,
    )
    console = stderr()
    loaded = _load(model, kv_policy, engine, quant, threads, console)
    conditions = plan_conditions(loaded, policy or [], budget)
    with fetch_progress(console) as on_progress:
        for condition in conditions:
            condition.prepare(on_progress)
    check_context(loaded, context, new_tokens)
    shape = (rounds, batch, context)
    if text is None:
        prompts = _random_prompts(loaded.config.vocab_size, shape, seed)
    else:
        prompts = _text_prompts(model, text, data_dir, shape)
    results = _measure(loaded, conditions, prompts, config, console)
    RunRecord(
        kind="eval-speed",
        command=shlex.join(["buddy", *sys.argv[1:]]),
        config={
            "model": model,
            **_setting(loaded),
            **asdict(config),
            "policies": list(dict.fromkeys(condition.spec for condition in conditions)),
            "budgets": budget,
            "context": context,
            "batch": batch,
            "prompts": "random token ids" if text is None else text,
            "distinct_prompts": batch * len(prompts),
        },
        results=results,
    ).save(out)
    show_speed(console, results)
    sys.stdout.write(f"{out}\n")


def _load(
    model: str,
    kv_policy: str | None,
    engine: str,
    quant: str | None,
    threads: int | None,
    console: "Console",
) -> "BuddyForCausalLM":
    import torch

    from buddy.cli.views.display import fetch_progress
    from buddy.model import BuddyForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    with fetch_progress(console) as on_progress:
        return BuddyForCausalLM.from_pretrained(
            model,
            kv_policy=kv_policy,
            merge_adapter=True,
            engine=engine,
            quant=quant,
            on_progress=on_progress,
        )


def _random_prompts(vocab: int, shape: tuple[int, int, int], seed: int) -> "Tensor":
    import torch

    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def _text_prompts(
    model: str, text: str, data_dir: Path | None, shape: tuple[int, int, int]
) -> "Tensor":
    """As many batches as the text fills, up to one a round."""
    from buddy.errors import ResultError
    from buddy.hub.loading import load_tokenizer
    from buddy.importance.calibration import cut_windows, read_text

    rounds, batch, context = shape
    source = read_text(text, data_dir)
    windows = cut_windows(load_tokenizer(model), source, tokens=context, limit=rounds * batch)
    full = len(windows) // batch
    if full == 0:
        raise ResultError(
            f"the text of {text} fills {len(windows)} prompts of {context} tokens, expected at "
            f"least the {batch} of a batch: give more text, or ask for less"
        )
    return windows[: full * batch].view(full, batch, context)


def _setting(model: "BuddyForCausalLM") -> dict[str, Any]:
    """What else speed depends on."""
    import torch

    on_gpu = model.device.type == "cuda"
    return {
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else model.device.type,
        "threads": torch.get_num_threads(),
        "attention": model.backbone.attention,
        "kv_policy": model.kv_policy,
        "engine": model.executor.describe(),
        "quant": model.quant,
        "prior": model.prior_facts,
    }


def _measure(
    model: "BuddyForCausalLM",
    conditions: list["Condition"],
    prompts: "Tensor",
    config: "SpeedConfig",
    console: "Console",
) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from buddy.evaluation.speed.speed import measure_speed

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(compact=True),
    )
    quiet = not console.is_terminal
    try:
        with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
            task = bar.add_task("Timing")
            return measure_speed(
                model,
                conditions,
                prompts,
                config,
                on_pass=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        console.print("interrupted: too few rounds to compare, so no record was written")
        raise
