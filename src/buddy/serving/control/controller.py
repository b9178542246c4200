"""Budgets from deadlines and from load: feed forward from the cost model, then trim.

Rows step together, so the tightest deadline rules all of them, and rows must be free as fast as
requests come. Elastic rows are lowered first, then prompts are put off, then nobody is let in. A
contract is never touched.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Final

from buddy.errors import BudgetError, PolicyError
from buddy.serving.control.admission import Admission, AdmissionConfig, Refused
from buddy.serving.control.cost import Correction, CostModel
from buddy.serving.control.load import Load, greatest
from buddy.serving.control.metrics import ServingMetrics
from buddy.serving.control.pace import PROMPT_SHARE, Arrivals, Dues, Pace, PromptRate
from buddy.serving.control.protocol import (
    Ending,
    Gauges,
    Orders,
    QueueView,
    RowView,
    StepReport,
    StepShape,
)
from buddy.serving.control.trim import Trim
from buddy.serving.request import GenerationRequest, Usage
from buddy.settings import Range, check_ranges

HOLD_TOKENS: Final = 8
"""Tokens for which a row keeps a depth."""
_SHARE: Final = 0.9
"""Share of a deadline that a predicted step may take."""
_RAISE: Final = 0.96
"""Share of that for a step at a greater depth: a cap at its edge stays where it is."""
_CHUNK: Final = 16
"""Tokens of prompts are fed in multiples of this."""
_DUE: Final = 2 * _CHUNK
"""Tokens of prompts that are fed for what is owed to them."""
_SMOOTH: Final = 0.1
_NEW_CONTEXT: Final = 64
"""Tokens that a row is taken to have before it is known."""
_DEMAND_S: Final = 4.0
"""Seconds over which requests are counted, to know how fast they come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """What the server promises and has room for."""

    num_blocks: Annotated[int, Range(1)]
    """Blocks of the model."""
    min_blocks: Annotated[int, Range(1)]
    """Elastic requests are never lowered below this."""
    max_rows: Annotated[int, Range(1)] = 32
    itl_ms: Annotated[float, Range(above=0)] | None = None
    """Target for the time between tokens; None = only deadlines of requests count."""
    most_prompt_tokens: Annotated[int, Range(1)] = 512
    """That one pass may feed."""
    plain_prompt_tokens: Annotated[int, Range(1)] = 256
    """The same beside rows that have no target."""
    patience_s: Annotated[float, Range(above=0)] = 1.0
    """Rows are kept empty no longer than this."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        if self.min_blocks > self.num_blocks:
            raise BudgetError(
                f"the least budget is {self.min_blocks} blocks and the model has "
                f"{self.num_blocks}: give a smaller one"
            )


class Controller:
    """The `Control` of a server: decides, counts, lets in.

    Args:
        config: What is promised.
        cost: Predicts a step.
        metrics: Are told.
        admission: When requests are refused.
        clock: In seconds; never goes back.
    """

    def __init__(
        self,
        config: ControlConfig,
        cost: CostModel,
        metrics: ServingMetrics,
        admission: AdmissionConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._cost, self._clock = config, cost, clock
        self._metrics, self._admission = metrics, Admission(admission or AdmissionConfig())
        self._lock, self._correction = Lock(), Correction()
        self._trim = Trim(config.min_blocks, config.num_blocks)
        self._cap = config.num_blocks
        self._target_s: float | None = None
        self._overhead_s = self._between_s = 0.0
        self._prompts = PromptRate()
        self._arrivals = Arrivals(_DEMAND_S)
        self._answer_tokens, self._answers = 64.0, 0
        self._known: set[int] = set()
        self._alone: dict[int, int] = {}
        self._dues, self._decode_s = Dues(), 0.0
        alone = self._cost.predict(StepShape.of_rows([config.min_blocks], [_NEW_CONTEXT + 1]))
        self._least_ms = metrics.least_ms_per_token = 1e3 * alone / _SHARE
        idle = StepShape().with_prompt(config.plain_prompt_tokens, config.num_blocks)
        self._idle = self._pace = self._make_pace(Load.of((), ()), None, idle)

    @property
    def least_ms_per_token(self) -> float:
        """The shortest time for a token that this machine reaches alone, at the smallest budget."""
        return self._least_ms

    @property
    def max_queue(self) -> int | None:
        """Requests that may wait."""
        return self._admission.config.max_queue

    @property
    def cap(self) -> int:
        """Blocks that elastic rows may run now."""
        return min(self._cap, self._trim.cap)

    @property
    def pace(self) -> Pace:
        """How fast the engine works now."""
        return self._pace

    def admit(self, request: GenerationRequest, queue: QueueView) -> None:
        """Let a request into the queue.

        Raises:
            Overloaded: It will not be taken now.
            BudgetError: Its deadline is below what the machine reaches.
        """
        least_ms = 0.0
        if request.budget.has_deadline:
            depth = min(max(request.budget.least, self._config.min_blocks), self._config.num_blocks)
            shape = StepShape.of_rows([depth], [len(request.prompt) + 1])
            least_ms = 1e3 * self._cost.predict(shape) / _SHARE
        pace = self._pace if queue.running or queue.size else self._idle
        try:
            self._admission.check(request, queue, pace, least_ms)
        except Refused as error:
            self._count(error.reason)
            self._came()
            raise
        except BudgetError:
            self._count("deadline")
            raise
        self._came()

    def decide(self, rows: Sequence[RowView], queue: QueueView) -> Orders:
        """Decide, before each pass, depths of elastic rows, tokens of prompts, and who may join."""
        now = self._clock()
        decoding = [row for row in rows if not row.prompt_left]
        backlog = queue.prompt_tokens + sum(row.prompt_left for row in rows)
        before_s, self._target_s = self._target_s, self._tightest(rows)
        if self._target_s is None or (before_s is not None and self._target_s > 1.1 * before_s):
            self._trim.reset()  # what was learnt of a tighter target says nothing of this one
        limit_s = self._limit(self._target_s)
        has_closed = self._trim.close(now, self.cap)
        load = Load.of(rows, [self._bounds(row) for row in rows])
        turn_s = self._turn(now, queue, limit_s)
        self._cap = self._feed_forward(load, turn_s, self._reserve(backlog, limit_s))
        cap = self.cap
        depths = {
            row.number: min(max(cap, least), most)
            for row, (least, most) in zip(rows, load.bounds, strict=True)
            if self._may_change(row)
        }
        now_shape = StepShape.of_rows(
            [depths.get(row.number, row.depth) for row in decoding],
            [row.context + 1 for row in decoding],
        )
        tokens = self._chunk(now_shape, limit_s, cap)
        if has_closed or not backlog:
            step = now_shape.with_prompt(tokens, cap)
            if rows and self._config.itl_ms is not None:
                step = self._lowest(decoding, limit_s)
            self._pace = self._make_pace(load, limit_s, step)
        self._decode_s, due_s = self._predict(now_shape), self._due_s(now_shape, cap)
        if self._dues.pays(due_s, waits=0 < len(decoding) < len(rows)):
            tokens = max(tokens, _DUE)
        is_late = queue.oldest_s > self._config.patience_s
        admits = not rows or is_late or self._has_room(load, limit_s)
        self._known = {row.number for row in decoding}
        if has_closed:
            self._alone.clear()
        self._metrics.depth_cap = cap
        changed = {row.number for row in rows if depths.get(row.number, row.depth) != row.depth}
        return Orders(
            depths={number: depths[number] for number in changed},
            prompt_tokens=tokens,
            unloaded=self._unloaded(rows),
            admits=admits,
            allows_draft_passes=self._target_s is None,
        )

    def report(self, step: StepReport) -> None:
        """Learn from a pass that has run."""
        now = self._clock()
        predicted_s = self._cost.predict(step)
        error = None
        if predicted_s > 0 and step.seconds > 0:
            error = abs(predicted_s * self._correction.factor / step.seconds - 1.0)
            self._correction.update(step.seconds, predicted_s)
            self._metrics.correction = self._correction.factor
        if step.gaps_s:
            beside = min(step.gaps_s) - step.seconds - step.draft_s - self._between_s
            beside = min(max(beside, 0.0), 0.5 * step.seconds)
            self._overhead_s += _SMOOTH * (beside - self._overhead_s)
            if self._target_s is not None:
                self._trim.add(step.gaps_s, self._target_s)
        # Where prompts have passes of their own, these lie between two tokens of a row.
        self._between_s = 0.0 if step.rows else self._between_s + step.seconds
        beside_s = self._decode_s if step.rows else 0.0
        prompt_s = max(step.seconds - beside_s, 0.0) if step.prompt_lanes else 0.0
        self._dues.add(step.seconds, prompt_s)
        self._prompts.add(step.prompt_lanes, now)
        self._metrics.step(step, error)

    def ended(self, how: Ending, usage: Usage | None, seconds: float) -> None:
        """A request is over."""
        if usage is not None and how in ("stop", "length"):
            self._answers += 1  # of which the first few weigh more: they are all that is known
            off = usage.completion_tokens - self._answer_tokens
            self._answer_tokens += max(_SMOOTH, 1.0 / (1 + self._answers)) * off
        self._metrics.ended(how, usage, seconds)

    def metrics(self, now: Gauges) -> bytes:
        """Counters and gauges in Prometheus' text format."""
        with self._lock:
            return self._metrics.render(now)

    def _count(self, reason: str) -> None:
        with self._lock:
            self._metrics.rejected(reason)

    def _came(self) -> None:
        """A request that could be served came, whether it is or not."""
        with self._lock:
            self._arrivals.add(self._clock())

    def _predict(self, shape: StepShape) -> float:
        return self._cost.predict(shape) * self._correction.factor

    def _tightest(self, rows: Sequence[RowView]) -> float | None:
        """The shortest time for a token that anybody was promised, in seconds."""
        promised_ms = (row.budget.ms_per_token for row in rows)
        tightest_ms = min([self._config.itl_ms or math.inf, *promised_ms])
        return tightest_ms / 1e3 if tightest_ms < math.inf else None

    def _limit(self, target_s: float | None) -> float | None:
        """That a pass may take, by prediction."""
        if target_s is None:
            return None
        return max(_SHARE * target_s - self._overhead_s, 0.1 * target_s)

    def _turn(self, now: float, queue: QueueView, limit_s: float | None) -> float | None:
        """That a pass may take if rows are to be free as fast as requests come, or less.

        By Little's law, rows = requests a second x tokens of an answer x seconds of a step. Those
        that wait for a row count as if they came within `2 * patience_s`.
        """
        if limit_s is None or self._config.itl_ms is None:
            return limit_s
        rows = self._pace.rows
        waiting = max(0, queue.running + queue.size - rows)
        with self._lock:
            demand = self._arrivals.rate(now) + waiting / (2.0 * self._config.patience_s)
        interval_s = rows / max(demand * self._answer_tokens, 1e-9)
        return min(limit_s, interval_s - self._overhead_s)

    def _bounds(self, row: RowView) -> tuple[int, int]:
        """Least and most blocks of a row that a load may give it."""
        if row.budget.is_default and self._config.itl_ms is None:
            return row.depth, row.depth  # nothing was asked of it, and nothing promised
        if not row.is_elastic:
            return row.depth, row.depth
        most = min(row.budget.most, max(row.wanted, row.budget.least))
        return min(max(row.budget.least, self._config.min_blocks), most), most

    def _may_change(self, row: RowView) -> bool:
        """A row keeps its depth for some tokens; one that did not decode yet may change at once."""
        return row.steps >= HOLD_TOKENS or row.number not in self._known

    def _reserve(self, backlog: float, limit_s: float | None) -> int:
        """Tokens of prompts that a pass should have room for: what comes, and what waits.

        What comes is an average over seconds, so that depth does not follow every prompt.
        """
        if limit_s is None:
            return 0
        wanted = self._prompts.rate + backlog / (2.0 * self._config.patience_s)
        tokens = min(wanted * limit_s, backlog + self._prompts.rate * limit_s)
        if not backlog and tokens < _CHUNK:
            return 0
        return min(self._config.most_prompt_tokens, int(tokens))

    def _feed_forward(self, load: Load, limit_s: float | None, reserve: int) -> int:
        """The greatest cap under which a pass of all rows keeps the limit."""
        config = self._config
        if limit_s is None or not load.bounds:
            return config.num_blocks

        def seconds(cap: int) -> float:
            return self._predict(load.shape(cap, reserve))

        if seconds(self._cap) <= limit_s:
            return greatest(
                self._cap, config.num_blocks, lambda cap: seconds(cap) <= _RAISE * limit_s
            )
        lower = max(self._cap - 1, config.min_blocks)
        return greatest(config.min_blocks, lower, lambda cap: seconds(cap) <= limit_s)

    def _chunk(self, shape: StepShape, limit_s: float | None, depth: int) -> int:
        """Tokens of prompts that fit beside these rows."""
        config = self._config
        if not shape.rows:
            return config.most_prompt_tokens
        if limit_s is None:
            return config.plain_prompt_tokens

        def fits(chunks: int) -> bool:
            return self._predict(shape.with_prompt(chunks * _CHUNK, depth)) <= limit_s

        return _CHUNK * greatest(0, max(config.most_prompt_tokens // _CHUNK, 1), fits)

    def _due_s(self, shape: StepShape, depth: int) -> float:
        """What it costs to feed a prompt beside these rows, though it does not fit."""
        return self._predict(shape.with_prompt(_DUE, depth)) - self._predict(shape)

    def _unloaded(self, rows: Sequence[RowView]) -> dict[int, int]:
        """Depths that rows with a deadline would have on a machine of their own."""
        depths = {}
        for row in rows:
            if row.budget.has_deadline:
                if row.number not in self._alone:
                    self._alone[row.number] = self._depth_alone(row)
                depths[row.number] = self._alone[row.number]
        return depths

    def _depth_alone(self, row: RowView) -> int:
        limit_s = self._limit(row.budget.ms_per_token / 1e3) or 0.0
        contexts = [row.context + row.prompt_left + 1]

        def fits(depth: int) -> bool:
            return self._predict(StepShape.of_rows([depth], contexts)) <= limit_s

        return greatest(*self._bounds(row), fits)

    def _has_room(self, load: Load, limit_s: float | None) -> bool:
        """Whether one row more keeps the limit, all elastic rows at their least."""
        if limit_s is None:
            return True
        least = self._config.min_blocks
        return self._predict(load.with_row(least, _NEW_CONTEXT).shape(least, 0)) <= limit_s

    def _lowest(self, decoding: Sequence[RowView], limit_s: float | None) -> StepShape:
        """A step of these rows as deep as they run before a request is refused, and of prompts."""
        shape = StepShape.of_rows(
            [self._bounds(row)[0] for row in decoding], [row.context + 1 for row in decoding]
        )
        least = self._config.min_blocks
        return shape.with_prompt(self._chunk(shape, limit_s, least), least)

    def _make_pace(self, load: Load, limit_s: float | None, step: StepShape) -> Pace:
        """How fast the engine works with these rows.

        Args:
            load: All of them.
            limit_s: That a pass may take.
            step: Of those that decode, and of as much of prompts as fits beside them.
        """
        config, tokens = self._config, step.prompt_lanes

        def fits(shape: StepShape) -> bool:
            return limit_s is None or self._predict(shape) <= limit_s

        interval_s = turn_s = self._predict(step) + self._overhead_s
        if config.itl_ms is not None and load.bounds:
            turn_s = self._predict(load.shape(config.min_blocks, self._reserve(0, limit_s)))
            turn_s += self._overhead_s
        due_s = self._due_s(step, config.min_blocks)
        rate = max(tokens / max(interval_s, 1e-9), PROMPT_SHARE * _DUE / max(due_s, 1e-9))
        return Pace(
            step_s=min(turn_s, interval_s),
            prompt_tokens_per_s=rate,
            tokens_per_answer=self._answer_tokens,
            rows=load.rows_that_fit(config.max_rows, fits),
            fixed_s=2 * interval_s,
        )
