"""`buddy load-test`: what a server does when requests come without waiting for one another."""

import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buddy.cli import options
from buddy.cli.command import Command
from buddy.cli.named import BUDGETS, offer
from buddy.errors import ResultError
from buddy.settings import Range

if TYPE_CHECKING:
    from rich.console import Console

    from buddy.lab.load.load import LoadConfig

_POSITIVE = Range(above=0, high=1e9)


def _check_weight(text: str) -> None:
    from buddy.lab.load.load import parse_budget_weight

    parse_budget_weight(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficOptions:
    """Which requests come, and when."""

    rate: Annotated[
        list[float], options.number(_POSITIVE, help="Requests a second; repeat for several.")
    ]
    duration: Annotated[
        float, options.number(Range(above=0, high=86_400), help="Seconds at each rate.")
    ] = 30.0
    budget: Annotated[
        list[str] | None,
        options.checked(
            _check_weight,
            "--budget",
            "-b",
            help='BUDGET or BUDGET=WEIGHT: 0.6, auto=2, {"ms_per_token": 20}=1, or none, which '
            "names nothing; repeat for a mixture. none if not given.",
            autocompletion=offer(*BUDGETS, "none"),
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        options.count(
            1,
            "--max-new-tokens",
            "--max-tokens",
            help="Most tokens of an answer. Natural lengths if not given.",
        ),
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line; built-in ones if not given.")
    ] = None
    seed: Annotated[int, options.seed("Seed of times, prompts and budgets.")] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodOptions:
    """What counts as a good answer."""

    slo_ttft_ms: Annotated[
        float | None,
        options.number(
            _POSITIVE,
            help="A good answer's first token comes within this. At any time if not given.",
        ),
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        options.number(
            _POSITIVE,
            help="A good answer's mean time between tokens is at most this. Any if not given.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointOptions:
    """What the server is asked with each request."""

    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="As the server names it. Its first if not given."),
    ] = None
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key.")
    ] = None
    temperature: options.Temperature = 0.0
    timeout: Annotated[
        float, options.number(_POSITIVE, help="Seconds after which an answer has failed.")
    ] = 300.0

    def key(self) -> str | None:
        """The server's key; None if it asks for none.

        Raises:
            ResultError: The variable is not set.
        """
        if self.key_env is None:
            return None
        if not os.environ.get(self.key_env):
            raise ResultError(
                f"the environment variable {self.key_env} is not set: put the key into it"
            )
        return os.environ[self.key_env]


@options.grouped
def load_test(
    url: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    out: options.RecordOut,
    *,
    traffic: TrafficOptions,
    good: GoodOptions,
    endpoint: EndpointOptions,
    label: Annotated[
        str | None, typer.Option(help="Name of the line in a figure. The budgets if not given.")
    ] = None,
) -> None:
    """Load an endpoint with random requests; record its answers.

    The endpoint may be any that speaks OpenAI's protocol. Nothing that is refused is asked again.
    buddy plot load draws the record.

    Example: `buddy load-test http://127.0.0.1:8000 --rate 2 --out load.json`
    """
    from buddy.cli.views.display import stderr
    from buddy.lab.cli.views.load_table import show_load
    from buddy.lab.load.load import PROMPTS, read_prompts
    from buddy.records import RunRecord

    config, prompts = _config(url, traffic, good, endpoint), traffic.prompts
    texts = list(PROMPTS) if prompts is None else read_prompts(prompts)
    key, console = endpoint.key(), stderr()
    results = _measure(config, texts, key, console)
    settings = {
        **asdict(config),
        "label": label or " ".join(name for name, _ in config.budgets),
        "prompts": "built-in" if prompts is None else str(prompts),
        "distinct_prompts": len(texts),
    }
    RunRecord(kind="serving-load", model=None, config=settings, results=results).save(out)
    show_load(console, results["points"])
    sys.stdout.write(f"{out}\n")
    if any(point["failed"] for point in results["points"]):
        _explain(console, results["requests"])


def _config(
    url: str, traffic: TrafficOptions, good: GoodOptions, endpoint: EndpointOptions
) -> "LoadConfig":
    from buddy.lab.load.load import LoadConfig, parse_budget_weight

    return LoadConfig(
        url=url,
        rates=tuple(traffic.rate),
        duration_s=traffic.duration,
        budgets=tuple(map(parse_budget_weight, traffic.budget or ["none"])),
        max_tokens=traffic.max_tokens,
        slo_ttft_ms=good.slo_ttft_ms,
        slo_itl_ms=good.slo_itl_ms,
        model=endpoint.model,
        temperature=endpoint.temperature,
        timeout_s=endpoint.timeout,
        seed=traffic.seed,
    )


def _measure(
    config: "LoadConfig", prompts: list[str], key: str | None, console: "Console"
) -> dict[str, Any]:
    from buddy.cli.views.bars import stoppable_bars
    from buddy.lab.load.load import run_load

    with stoppable_bars(console, "interrupted: no record was written") as bars:
        return run_load(config, prompts, key=key, on_done=bars.counter("Requests"))


def _explain(console: "Console", requests: list[dict[str, Any]]) -> None:
    """Say what most failed requests were told; all of them is a failure of the command."""
    errors = [
        request["error"]
        for request in requests
        if not request["finished"] and request["status"] != 429
    ]
    ((most, times),) = Counter(errors).most_common(1)
    console.print(f"{times} of {len(requests)} requests failed: {most or 'the answer broke off'}")
    if len(errors) == len(requests):
        raise typer.Exit(1)


COMMAND = Command(name="load-test", group="measure", place=5, run=load_test, alias="load")
