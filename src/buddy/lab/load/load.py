"""An open-loop load on a chat endpoint: requests come at random times, whatever the server does.

A closed loop waits for answers before it asks again, and so hides a slow server from itself.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from buddy.errors import DataError, ResultError, shown
from buddy.files import read_text
from buddy.lab.load.request import Outcome, ask, first_model
from buddy.settings import SEED, Range, check_ranges

_MOST_PROMPT_BYTES: Final = 64 * 2**20
_MOST_REQUESTS: Final = 1_000_000
PROMPTS: Final = (
    "Explain why the sky is blue.",
    "Name three fruits that grow in cold countries, and say when each is ripe.",
    "Write a short poem about a lighthouse in winter.",
    "What is the difference between weather and climate?",
    "Give me a recipe for a simple vegetable soup.",
    "A train leaves at nine and travels 180 km at 90 km/h. When does it arrive?",
    "Summarise the story of Cinderella in three sentences.",
    "Translate into French: the library is closed on Mondays.",
    "List five things to check before buying a used bicycle.",
    "Who wrote Don Quixote, and what is it about?",
    "Write a polite note to a neighbour whose dog barks at night.",
    "How does a refrigerator keep food cold?",
    "What are prime numbers? Give the first ten.",
    "Write a Python function that reverses the words of a sentence.",
    "Describe a sunset by the sea to somebody who has never seen one.",
    "Why do leaves change their colour in autumn?",
)
"""Short instructions of several kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """What is asked, how often, and what counts as good."""

    url: str
    """Address of the server, with or without `/v1`."""
    rates: tuple[float, ...]
    """Requests a second, one after the other."""
    duration_s: Annotated[float, Range(above=0, high=86_400)] = 30.0
    """Seconds for which requests come, at each rate."""
    budgets: tuple[tuple[str, float], ...] = (("none", 1.0),)
    """What requests name as their budget, and how often in relation; `none` = nothing."""
    max_tokens: Annotated[int, Range(1)] | None = None
    """Each answer has exactly as many where the server knows `ignore_eos`; None = natural
    lengths."""
    slo_ttft_ms: Annotated[float, Range(above=0)] | None = None
    """A good answer's first token comes within this; None = whenever."""
    slo_itl_ms: Annotated[float, Range(above=0)] | None = None
    """A good answer's mean time between tokens is at most this."""
    model: str | None = None
    """Model as the server names it; None = the first that it lists."""
    temperature: Annotated[float, Range(0)] = 0.0
    timeout_s: Annotated[float, Range(above=0)] = 300.0
    """Seconds after which an answer has failed."""
    seed: Annotated[int, SEED] = 0
    """Seed of times, prompts and budgets."""

    def __post_init__(self) -> None:
        check_ranges(self, ResultError)
        if not _is_url(self.url):
            raise ResultError(
                "the URL of a server is like http://127.0.0.1:8000, with a port from 1 to 65535 or "
                f"none, got {shown(self.url)}"
            )
        for rate in self.rates:
            if rate not in Range(above=0, high=_MOST_REQUESTS / self.duration_s):
                raise ResultError(
                    f"a rate must be above 0, and give at most {_MOST_REQUESTS:,} requests, got "
                    f"{rate:g} a second for {self.duration_s:g} s"
                )


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def parse_budget_weight(text: str) -> tuple[str, float]:
    """Read `BUDGET` or `BUDGET=WEIGHT`.

    Raises:
        ResultError: The weight is no number above 0, or the budget begins like JSON and is none.
    """
    budget, equals, weight = text.rpartition("=")
    if not equals:
        budget, weight = text, "1"
    try:
        share = float(weight)
    except ValueError:
        share = math.nan
    if not budget or share not in Range(above=0):
        raise ResultError(f"a budget is BUDGET or BUDGET=WEIGHT, as in 0.6=2, got {shown(text)}")
    if budget.startswith("{"):
        try:
            json.loads(budget)
        except ValueError as error:
            raise ResultError(f"the budget {shown(budget)} is no JSON: {error}") from error
    return budget, share


def read_prompts(path: Path) -> list[str]:
    """Prompts of a text file, one a line.

    Raises:
        DataError: It cannot be read, or has none.
    """
    text = read_text(path, DataError, most=_MOST_PROMPT_BYTES)
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"{path} has no prompts: expected one a line")
    return prompts


def schedule(rate: float, duration_s: float, rng: Random) -> list[float]:
    """Seconds at which requests come: a Poisson process."""
    at, times = rng.expovariate(rate), []
    while at < duration_s:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def run_load(
    config: LoadConfig,
    prompts: Sequence[str] = PROMPTS,
    *,
    key: str | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Send the requests, and say what came of them.

    Args:
        config: What is asked.
        prompts: Drawn from at random.
        key: Of the server, if it wants one.
        on_done: Told how many requests of how many are done.

    Returns:
        Results of a `serving-load` record: `points`, one for each rate, and `requests`.

    Raises:
        ResultError: There is no server, it lists no model, or httpx is not installed.
    """
    return asyncio.run(_run(config, prompts, key, on_done or (lambda done, total: None)))


async def _run(
    config: LoadConfig, prompts: Sequence[str], key: str | None, on_done: Callable[[int, int], None]
) -> dict[str, Any]:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ResultError(
            'a load needs httpx, which is not installed: pip install "buddy-llm[serve]"'
        ) from error
    base = config.url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ResultError("the server's key must be printable ASCII: no header carries others")
    plans = _plan(config, prompts)
    total, done = sum(map(len, plans)), 0
    on_done(done, total)
    points, requests = [], []
    async with httpx.AsyncClient(
        headers={} if key is None else {"authorization": f"Bearer {key}"},
        timeout=httpx.Timeout(config.timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    ) as client:
        model = config.model or await first_model(client, base)

        async def send(outcome: Outcome, body: dict[str, Any], zero_s: float) -> None:
            nonlocal done
            await asyncio.sleep(max(0.0, zero_s + outcome.at_s - time.perf_counter()))
            try:
                async with asyncio.timeout(config.timeout_s):
                    await ask(client, f"{base}/chat/completions", body, outcome)
            except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
                outcome.error = str(error) or type(error).__name__
            outcome.end_s = time.perf_counter() - zero_s
            done += 1
            on_done(done, total)

        for rate, plan in zip(config.rates, plans, strict=True):
            started_s = time.perf_counter()
            await asyncio.gather(
                *(send(outcome, {"model": model, **body}, started_s) for outcome, body in plan)
            )
            outcomes = [outcome for outcome, _ in plan]
            points.append(summarise(config, rate, outcomes))
            requests += [{"rate": rate, **_written(outcome)} for outcome in outcomes]
    return {"served_model": model, "points": points, "requests": requests}


def _plan(config: LoadConfig, prompts: Sequence[str]) -> list[list[tuple[Outcome, dict[str, Any]]]]:
    """What is sent at each rate; the same seed plans the same."""
    plans = []
    names, weights = zip(*config.budgets, strict=True)
    for place, rate in enumerate(config.rates):
        rng = Random(f"{config.seed} {place} {rate}")
        plan = []
        for at in schedule(rate, config.duration_s, rng):
            budget = rng.choices(names, weights)[0]
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": rng.choice(prompts)}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "temperature": config.temperature,
            }
            if config.max_tokens is not None:
                body |= {"max_tokens": config.max_tokens, "ignore_eos": True}
            if budget != "none":
                body["budget"] = _as_json(budget)
            plan.append((Outcome(at, budget), body))
        plans.append(plan)
    return plans


def _as_json(budget: str) -> Any:
    """A number or an object as such, another text as it is."""
    try:
        return json.loads(budget)
    except ValueError:
        return budget


def _written(outcome: Outcome) -> dict[str, Any]:
    return asdict(outcome) | {"itls_ms": [round(gap, 2) for gap in outcome.itls_ms]}


def summarise(config: LoadConfig, rate: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One point: what was offered at a rate and what was served.

    Rates are over the time from the first arrival to the last answer, so that a tail of answers
    which come late does not count as speed.

    Args:
        config: What counts as good.
        rate: That was meant.
        outcomes: Of all requests at that rate.
    """
    lasted_s = max([config.duration_s, *(outcome.end_s for outcome in outcomes)])
    finished = [outcome for outcome in outcomes if outcome.finished]
    firsts = [outcome.ttft_ms for outcome in finished if outcome.ttft_ms is not None]
    gaps = [gap for outcome in finished for gap in outcome.itls_ms]
    fed = [outcome for outcome in finished if outcome.blocks_per_token is not None]
    tokens = sum(outcome.tokens for outcome in fed)
    blocks = sum((outcome.blocks_per_token or 0.0) * outcome.tokens for outcome in fed)
    refused = sum(outcome.status == 429 for outcome in outcomes)
    return {
        "rate": rate,
        "requests": len(outcomes),
        "offered_rps": len(outcomes) / config.duration_s,
        "served_rps": len(finished) / lasted_s,
        "goodput_rps": sum(is_good(outcome, config) for outcome in outcomes) / lasted_s,
        "refused": refused,
        "failed": len(outcomes) - len(finished) - refused,
        "tokens_per_s": sum(outcome.tokens for outcome in finished) / lasted_s,
        **_percentiles("ttft_ms", firsts),
        **_percentiles("itl_ms", gaps),
        "blocks_per_token": blocks / tokens if tokens else None,
        "num_blocks": fed[0].num_blocks if fed else None,
        "lasted_s": lasted_s,
    }


def is_good(outcome: Outcome, config: LoadConfig) -> bool:
    """Whether an answer finished within both promises."""
    if not outcome.finished or outcome.ttft_ms is None:
        return False
    itl_ms = outcome.itl_ms
    return (config.slo_ttft_ms is None or outcome.ttft_ms <= config.slo_ttft_ms) and (
        config.slo_itl_ms is None or itl_ms is None or itl_ms <= config.slo_itl_ms
    )


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """The nearest rank at 50, 95 and 99 %; None of nothing."""
    ranked = sorted(values)
    return {
        f"{name}_p{share}": ranked[math.ceil(share / 100 * len(ranked)) - 1] if ranked else None
        for share in (50, 95, 99)
    }
