"""What Prometheus is told: vLLM's names where they mean the same, and ours.

A step adds to plain lists; families are made of them when somebody asks. So a step pays for a few
additions, and no lock.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from buddy.budget.resolved import BudgetKind
from buddy.serving.client import EngineState
from buddy.serving.control.protocol import Ending, Gauges, StepReport
from buddy.serving.request import Usage

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_FIRSTS_S: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_GAPS_S: Final = (
    *(0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
_ANSWERS_S: Final = (
    *(0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
_ERRORS: Final = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0)
_REASONS: Final[dict[Ending, str]] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "failed": "error",
}
"""vLLM's names of how a request ended."""
SOURCES: Final = tuple(kind for kind in get_args(BudgetKind) if kind != "own")
"""Kinds of budget that a client can name."""
REJECTIONS: Final = ("queue_full", "queue_age", "ttft", "deadline")


class Tally:
    """A histogram that one thread adds to and another may read.

    Args:
        bounds: Upper bounds of its buckets, rising; one without a bound is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds as Prometheus writes them, and how many values were at most that."""
        from prometheus_client.utils import floatToGoString

        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class ServingMetrics:
    """Counts what happens, and writes it in Prometheus' text format.

    Args:
        model: As clients name it; a label of vLLM's metrics.
        num_blocks: Of the model.
        max_rows: Requests that can run at a time.
    """

    def __init__(self, model: str, num_blocks: int, max_rows: int) -> None:
        from prometheus_client import CollectorRegistry

        self._model, self._num_blocks, self._max_rows = model, num_blocks, max_rows
        self._firsts, self._gaps = Tally(_FIRSTS_S), Tally(_GAPS_S)
        self._answers, self._steps = Tally(_ANSWERS_S), Tally(_GAPS_S)
        self._error = Tally(_ERRORS)
        self._depths = {
            source: Tally([float(blocks + 1) for blocks in range(num_blocks)]) for source in SOURCES
        }
        self._ended = dict.fromkeys(_REASONS.values(), 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._prompt = self._generated = self._hit = 0
        self._drafted = self._accepted = self._draft_blocks = 0
        self._lowered = self._blocks = self._tokens = self._prompt_lanes = 0
        self._now: Gauges | None = None
        self.depth_cap = num_blocks
        self.correction = 1.0
        self.least_ms_per_token = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(_Collector(self))

    def step(self, step: StepReport, error: float | None) -> None:
        """A pass has run.

        Args:
            step: What it was.
            error: Of the cost model: |predicted / actual - 1|; None where nothing was predicted.
        """
        self._steps.add(step.seconds)
        self._blocks += step.row_blocks
        self._tokens += step.rows
        self._prompt_lanes += step.prompt_lanes
        self._generated += len(step.gaps_s) + len(step.firsts_s) + step.accepted
        self._drafted += step.drafted
        self._accepted += step.accepted
        self._draft_blocks += step.draft_blocks
        for gap in step.gaps_s:
            self._gaps.add(gap)
        for first in step.firsts_s:
            self._firsts.add(first)
        if error is not None:
            self._error.add(error)

    def ended(self, how: Ending, usage: Usage | None, seconds: float) -> None:
        """A request is over.

        Args:
            how: It ended.
            usage: What it took; None where it never got a row.
            seconds: Since it was submitted.
        """
        self._ended[_REASONS[how]] += 1
        if how in ("stop", "length"):
            self._answers.add(seconds)
        if usage is None:
            return
        self._prompt += usage.prompt_tokens
        self._hit += usage.cached_tokens
        self._lowered += usage.lowered_from is not None
        if usage.completion_tokens and usage.source in self._depths:
            self._depths[usage.source].add(usage.blocks_per_token)

    def rejected(self, reason: str) -> None:
        """A request was not let in, for one of `REJECTIONS`."""
        self._rejected[reason] += 1

    def render(self, now: Gauges) -> bytes:
        """Everything in Prometheus' text format."""
        from prometheus_client import generate_latest

        self._now = now
        return generate_latest(self._registry)

    def families(self) -> Iterator["Metric"]:
        """Everything that is known now."""
        yield from self._of_vllm()
        yield from self._of_ours()

    def _of_vllm(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge
        from prometheus_client.core import HistogramMetricFamily as Histogram

        now, labels, model = self._now, ["model_name"], [self._model]
        running, waiting = (0, 0) if now is None else (now.running, now.waiting)
        in_use = running / self._max_rows
        for kind, name, help_text, *numbers in (
            (Gauge, "num_requests_running", "Requests that have a row.", running),
            (Gauge, "num_requests_waiting", "Requests that wait for a row.", waiting),
            (Gauge, "kv_cache_usage_perc", "Rows of the cache in use; 1 = all.", in_use),
            (
                Counter,
                "prompt_tokens",
                "Tokens of prompts of requests that are over.",
                self._prompt,
            ),
            (Counter, "generation_tokens", "Tokens of answers.", self._generated),
            (
                Counter,
                "prefix_cache_queries",
                "Tokens of prompts that were looked for.",
                self._prompt,
            ),
            (
                Counter,
                "prefix_cache_hits",
                "Tokens of prompts that the prefix cache had.",
                self._hit,
            ),
            (
                Counter,
                "spec_decode_num_draft_tokens",
                "Tokens of answers that were drafted.",
                self._drafted,
            ),
            (
                Counter,
                "spec_decode_num_accepted_tokens",
                "Tokens of answers that were drafted rightly.",
                self._accepted,
            ),
        ):
            yield _family(kind(f"vllm:{name}", help_text, labels=labels), [(model, *numbers)])
        yield _family(
            Counter(
                "vllm:request_success",
                "Requests that are over, by how they ended.",
                labels=[*labels, "finished_reason"],
            ),
            [([*model, reason], count) for reason, count in self._ended.items()],
        )
        for name, help_text, tally in (
            ("time_to_first_token_seconds", "From submission to the first token.", self._firsts),
            ("inter_token_latency_seconds", "Between two tokens of an answer.", self._gaps),
            ("time_per_output_token_seconds", "The same, by its older name.", self._gaps),
            ("e2e_request_latency_seconds", "From submission to the last token.", self._answers),
        ):
            histogram = Histogram(f"vllm:{name}", help_text, labels=labels)
            yield _family(histogram, [(model, tally.buckets(), tally.sum)])

    def _of_ours(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge
        from prometheus_client.core import HistogramMetricFamily as Histogram

        now = self._now
        prefixes = (0, 0) if now is None else (now.kept_prefixes, now.kept_tokens)
        cache_bytes = 0 if now is None else now.cache_bytes
        for name, help_text, value in (
            ("depth_cap", "Blocks that elastic requests may run now.", self.depth_cap),
            ("num_blocks", "Blocks of the model.", self._num_blocks),
            ("cost_correction", "Actual over predicted time of a step.", self.correction),
            ("least_ms_per_token", "Shortest time for a token.", self.least_ms_per_token),
            ("prefixes_kept", "Of the prefix cache.", prefixes[0]),
            ("prefix_tokens_kept", "Of the prefix cache.", prefixes[1]),
            ("cache_bytes", "Of keys, values and residuals.", cache_bytes),
        ):
            yield Gauge(f"buddy_{name}", help_text, value=value)
        yield _family(
            Gauge("buddy_engine_state", "1 for the state that the engine is in.", labels=["state"]),
            [
                ([state], float(now is not None and now.state == state))
                for state in get_args(EngineState)
            ],
        )
        lowered = "Requests over that had less depth than without load."
        for name, help_text, count in (
            ("blocks", "Blocks that ran for tokens of answers.", self._blocks),
            ("draft_blocks", "Blocks that ran to draft tokens.", self._draft_blocks),
            ("tokens", "Tokens of answers that were fed, drafts too.", self._tokens),
            ("prefill_tokens", "Tokens of prompts that were fed.", self._prompt_lanes),
            ("lowered_requests", lowered, self._lowered),
        ):
            yield Counter(f"buddy_{name}", help_text, value=count)
        yield _family(
            Counter("buddy_rejected_requests", "Requests not let in.", labels=["reason"]),
            [([reason], count) for reason, count in self._rejected.items()],
        )
        about_depths = "Of an answer, by who chose its budget."
        yield _family(
            Histogram("buddy_blocks_per_token", about_depths, labels=["source"]),
            [([name], tally.buckets(), tally.sum) for name, tally in self._depths.items()],
        )
        for name, help_text, tally in (
            ("step_seconds", "One pass, without sampling and delivery.", self._steps),
            ("cost_error", "Of the predicted time of a step, relative.", self._error),
        ):
            yield Histogram(
                f"buddy_{name}", help_text, buckets=tally.buckets(), sum_value=tally.sum
            )


def _family(family: Any, samples: Iterable[tuple[Any, ...]]) -> "Metric":
    """A family with these samples: each is values of the labels, and then numbers."""
    for sample in samples:
        family.add_metric(*sample)
    return cast("Metric", family)


class _Collector:
    """What the registry asks."""

    def __init__(self, metrics: ServingMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator["Metric"]:
        """Families, made now."""
        return self._metrics.families()
