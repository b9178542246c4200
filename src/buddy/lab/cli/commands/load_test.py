"""`buddy load`: what a server does under a load of requests that do not wait for one another."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.errors import ResultError
from buddy.settings import Range

if TYPE_CHECKING:
    from rich.console import Console

_POSITIVE = Range(above=0, high=1e9)


def _check_weight(text: str) -> None:
    from buddy.lab.load.load import parse_budget_weight

    parse_budget_weight(text)


def load(
    url: Annotated[str, typer.Argument(help="Of a server, such as http://127.0.0.1:8000.")],
    out: options.RecordOut,
    rate: Annotated[
        list[float], options.number(_POSITIVE, help="Requests a second; repeat for more.")
    ],
    duration: Annotated[
        float, options.number(Range(above=0, high=86_400), help="Seconds at each rate.")
    ] = 30.0,
    budget: Annotated[
        list[str] | None,
        options.checked(
            _check_weight,
            "--budget",
            "-b",
            help='BUDGET or BUDGET=WEIGHT: 0.6, auto=2, {"ms_per_token": 20}=1, or none, which '
            "names nothing; repeat for a mixture.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, options.count(1, help="Of every answer; natural lengths if not given.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line; built-in ones if not given.")
    ] = None,
    slo_ttft_ms: Annotated[
        float | None,
        options.number(_POSITIVE, help="A good answer's first token comes within this."),
    ] = None,
    slo_itl_ms: Annotated[
        float | None,
        options.number(_POSITIVE, help="A good answer's mean time between tokens is at most this."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As the server names it; else its first.")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key.")
    ] = None,
    temperature: options.Temperature = 0.0,
    timeout: Annotated[
        float, options.number(_POSITIVE, help="Seconds after which an answer has failed.")
    ] = 300.0,
    label: Annotated[str | None, typer.Option(help="Of the line in a figure.")] = None,
    seed: Annotated[int, options.seed("Of times, prompts and budgets.")] = 0,
) -> None:
    """Load an endpoint with random requests; record its answers.

    The endpoint may be any that speaks OpenAI's protocol. Nothing that is refused is asked again.
    buddy plot load draws the record.
    """
    from buddy.cli.views.display import stderr
    from buddy.lab.load.load import PROMPTS, LoadConfig, parse_budget_weight, read_prompts
    from buddy.records import RunRecord

    config = LoadConfig(
        url=url,
        rates=tuple(rate),
        duration_s=duration,
        budgets=tuple(parse_budget_weight(one) for one in budget or ["none"]),
        max_tokens=max_tokens,
        slo_ttft_ms=slo_ttft_ms,
        slo_itl_ms=slo_itl_ms,
        model=model,
        temperature=temperature,
        timeout_s=timeout,
        seed=seed,
    )
    texts = list(PROMPTS) if prompts is None else read_prompts(prompts)
    if key_env is not None and not os.environ.get(key_env):
        raise ResultError(f"the environment variable {key_env} is not set: put the key into it")
    console = stderr()
    results = _measure(config, texts, os.environ[key_env] if key_env else None, console)
    RunRecord(
        kind="serving-load",
        model=None,
        config={
            **_plain(config),
            "label": label or " ".join(name for name, _ in config.budgets),
            "prompts": "built-in" if prompts is None else str(prompts),
            "distinct_prompts": len(texts),
        },
        results=results,
    ).save(out)
    _show(console, results)
    sys.stdout.write(f"{out}\n")
    if any(one["failed"] for one in results["points"]):
        _explain(console, results["requests"])


def _plain(config: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(config)


def _measure(config: Any, prompts: list[str], key: str | None, console: "Console") -> Any:
    from buddy.cli.views.bars import Bars
    from buddy.lab.load.load import run_load

    try:
        with Bars(console) as bar:
            task = bar.add_task("Requests")
            return run_load(
                config,
                prompts,
                key=key,
                on_done=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except KeyboardInterrupt:
        console.print("interrupted: no record was written")
        raise typer.Exit(130) from None


def _explain(console: "Console", requests: list[dict[str, Any]]) -> None:
    """Say what most failed requests were told; all of them is a failure of the command."""
    failed = [one["error"] for one in requests if not one["finished"] and one["status"] != 429]
    ((most, times),) = Counter(failed).most_common(1)
    console.print(f"{times} of {len(requests)} requests failed: {most or 'the answer broke off'}")
    if len(failed) == len(requests):
        raise typer.Exit(1)


def _show(console: "Console", results: dict[str, Any]) -> None:
    from buddy.lab.cli.views.load_table import show_load

    show_load(console, results["points"])


COMMAND = Command(name="load-test", group="measure", place=5, run=load, alias="load")
