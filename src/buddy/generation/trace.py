"""DepthTrace: which blocks ran for each token of a generation, and how long it took."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import mode
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import DepthPlan
from buddy.engine.clock import wait_for
from buddy.engine.step import StepOutput
from buddy.errors import PolicyError

T = TypeVar("T")

FinishReason = Literal["stop", "length", "context"]
"""Why a sequence ended: an end of text or a criterion of the caller's, as many tokens as were asked
for, or a full context."""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One forward pass, as it was noted; what is read off it waits until somebody asks.

    A pass over drafted tokens is noted as the passes of a token each whose place it took.

    Attributes:
        tokens: New columns fed, 1 in decode.
        fed: New tokens of all rows, pads left out.
        rows: Of the batch, those that took part, in the order of the lanes.
        batch: Rows in all.
        started_s, ended_s: On the trace's clock.
        engine: Who ran it.
    """

    tokens: int
    fed: int
    rows: tuple[int, ...]
    batch: int
    started_s: Any
    ended_s: Any
    engine: str
    _plan: DepthPlan
    _executed: Int[Tensor, " lanes"]
    _last: NDArray[np.int64]

    @cached_property
    def plans(self) -> tuple[tuple[int, ...], ...]:
        """The blocks that each row's last new token ran; none for a row that has ended."""
        return self._by_row(self._plan.select(self._last).executed_sets, ())

    @cached_property
    def executed(self) -> tuple[int, ...]:
        """How many they were, counted where they ran."""
        return self._by_row(self._executed[torch.from_numpy(self._last)].tolist(), 0)

    @cached_property
    def spent(self) -> int:
        """Blocks that all new tokens ran."""
        return int(self._executed[: self.fed].sum())

    def _by_row(self, values: Sequence[T], of_others: T) -> tuple[T, ...]:
        known = dict(zip(self.rows, values, strict=True))
        return tuple(known.get(row, of_others) for row in range(self.batch))


@dataclass(slots=True)
class DepthTrace:
    """Collects steps; pass one to `generate(..., trace=trace)`. Step 0 is the prefill.

    What drafts is no step, nor is a token that was taken back.

    Attributes:
        num_blocks: Of the model.
        clock: Tells when a step begins and ends; by default it is the host's, and every device that
            the model lies on is waited for.
        finish_reasons: Of each sequence, once `generate` is through.
        context: Tokens that a sequence may have; 0 until then.
        steps: All of them, in the order of time.
    """

    num_blocks: int = 0
    clock: Callable[[], Any] | None = None
    finish_reasons: tuple[FinishReason, ...] = ()
    context: int = 0
    steps: list[TracedStep] = field(default_factory=list)
    _devices: tuple[torch.device, ...] = field(default=(), init=False, repr=False)

    def start(self, devices: Iterable[torch.device]) -> Any:
        """Note that a pass begins.

        Args:
            devices: Where its blocks are.

        Returns:
            When it does, on the clock.
        """
        self._devices = tuple(devices)
        return self._now()

    def _now(self) -> Any:
        if self.clock is not None:
            return self.clock()
        wait_for(self._devices)
        return time.perf_counter()

    def record(
        self,
        out: StepOutput,
        started_s: Any,
        *,
        tokens: int,
        rows: Sequence[int],
        batch: int,
        kept: Sequence[int] | None = None,
    ) -> None:
        """Add the forward pass that `start` began, and that has just ended.

        Args:
            out: What ran.
            started_s: As `start` gave it.
            tokens: Columns that were fed.
            rows: Of the batch, those that took part, in the order of the lanes.
            batch: Rows in all.
            kept: New tokens of each row that are not taken back; None = all.
        """
        ended_s = self._now()
        if kept is not None:
            self._record_kept(out, (started_s, ended_s), rows, batch, kept)
            return
        self.num_blocks = out.plan.host.shape[1]
        step = TracedStep(
            tokens=tokens,
            fed=out.lanes.num,
            rows=tuple(rows),
            batch=batch,
            started_s=started_s,
            ended_s=ended_s,
            engine=out.engine,
            _plan=out.plan,
            _executed=out.executed,
            _last=out.lanes.last,
        )
        self.steps.append(step)

    def _record_kept(
        self,
        out: StepOutput,
        span_s: tuple[Any, Any],
        rows: Sequence[int],
        batch: int,
        kept: Sequence[int],
    ) -> None:
        """Add a step for the first token of each row that is kept, one for the second, ..."""
        self.num_blocks = out.plan.host.shape[1]
        started_s, ended_s = span_s
        share_s = (ended_s - started_s) / max(kept)
        for number in range(max(kept)):
            places = [place for place, count in enumerate(kept) if count > number]
            lanes = out.lanes.first[places] + number
            step = TracedStep(
                tokens=1,
                fed=len(places),
                rows=tuple(rows[place] for place in places),
                batch=batch,
                started_s=started_s + number * share_s,
                ended_s=ended_s - (max(kept) - 1 - number) * share_s,
                engine=out.engine,
                _plan=out.plan.select(lanes),
                _executed=out.executed[torch.from_numpy(lanes)],
                _last=np.arange(len(places)),
            )
            self.steps.append(step)

    def finish(self, reasons: tuple[FinishReason, ...], context: int) -> None:
        """Note why each sequence ended, and how many tokens one may have."""
        self.finish_reasons, self.context = reasons, context

    @property
    def distinct_plans(self) -> int:
        """Different sets of blocks over all rows and steps."""
        return len({plan for step in self.steps for plan in step.plans if plan})

    @property
    def changes(self) -> int:
        """How often a row's plan was another one than at the step before.

        Raises:
            PolicyError: The trace has collected batches of several sizes.
        """
        sizes = sorted({len(step.plans) for step in self.steps})
        if len(sizes) > 1:
            raise PolicyError(
                f"the trace has steps of batches of {sizes} rows, whose plans cannot be compared: "
                "give each generation a DepthTrace() of its own"
            )
        pairs = pairwise(step.plans for step in self.steps)
        return sum(b != a for old, new in pairs for a, b in zip(old, new, strict=True) if b)

    @property
    def blocks_per_token(self) -> float:
        """Mean number of blocks that a fed token ran."""
        return sum(step.spent for step in self.steps) / max(sum(s.fed for s in self.steps), 1)

    @property
    def decode_blocks_per_token(self) -> float:
        """The same, of the tokens after the first pass."""
        after = self.steps[1:]
        return sum(step.spent for step in after) / max(sum(step.fed for step in after), 1)

    @property
    def decode_engine(self) -> str | None:
        """Who ran the passes after the first, most of them; None if there was but one."""
        return mode(step.engine for step in self.steps[1:]) if len(self.steps) > 1 else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt columns of all rows, by the time of the first pass; None if there was none."""
        if not self.steps:
            return None
        first = self.steps[0]
        return float(first.tokens * len(first.plans) / (first.ended_s - first.started_s))

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens of all rows after the first, sampling included; None if there was but one."""
        if len(self.steps) < 2:
            return None
        elapsed = self.steps[-1].ended_s - self.steps[0].ended_s
        return float(sum(step.fed for step in self.steps[1:]) / elapsed)

    def to_json(self) -> dict[str, Any]:
        """Plain values: steps with their rows' blocks, and the summary figures."""
        return {
            "num_blocks": self.num_blocks,
            "blocks_per_token": round(self.blocks_per_token, 3),
            "distinct_plans": self.distinct_plans,
            "plan_changes": self.changes,
            "finish_reasons": list(self.finish_reasons),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "steps": [
                {
                    "tokens": step.tokens,
                    "executed": list(step.executed),
                    "blocks": [list(plan) for plan in step.plans],
                    "seconds": round(step.ended_s - step.started_s, 6),
                }
                for step in self.steps
            ],
        }


def finish_reasons(
    sequences: Int[Tensor, "sequences columns"], config: Any, *, is_cut: bool
) -> tuple[FinishReason, ...]:
    """Why each sequence ended.

    Args:
        sequences: What was written.
        config: The options, as transformers' `generate` has left them.
        is_cut: Whether the context allowed fewer tokens than were asked for.
    """
    early: FinishReason = "stop"
    if sequences.shape[1] < config.max_length:
        return (early,) * len(sequences)
    ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
    # A sequence that ended earlier is filled up with pads, where there is an end of text.
    ends += [int(config._pad_token_tensor)] if ends else []
    late: FinishReason = "context" if is_cut else "length"
    return tuple(early if token in ends else late for token in sequences[:, -1].tolist())
