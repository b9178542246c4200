"""DepthTrace: which blocks ran for each token of a generation, and how long it took."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from buddy.depth.plan import DepthPlan


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One forward pass.

    Attributes:
        tokens: New columns fed, 1 in decode; with drafts, those that a verification kept.
        plans: Each row's executed blocks.
        executed: Each row's number of blocks, counted where they ran.
        started_s, ended_s: On the trace's clock.
    """

    tokens: int
    plans: tuple[tuple[int, ...], ...]
    executed: tuple[int, ...]
    started_s: Any
    ended_s: Any


@dataclass(slots=True)
class DepthTrace:
    """Collects steps; pass one to `generate(..., trace=trace)`. Step 0 is the prefill.

    Drafts are no steps.

    Attributes:
        num_blocks: Of the model.
        steps: In the order of time.
        clock: Tells when a step begins and ends.
    """

    num_blocks: int = 0
    steps: list[TracedStep] = field(default_factory=list)
    clock: Callable[[], Any] = time.perf_counter

    def record(self, plan: DepthPlan, executed: list[int], tokens: int, started_s: Any) -> None:
        """Add one forward pass that has just ended."""
        self.num_blocks = plan.mask.shape[1]
        ended_s = self.clock()
        self.steps.append(TracedStep(tokens, plan.keys, tuple(executed), started_s, ended_s))

    @property
    def distinct_plans(self) -> int:
        """Different sets of blocks over all rows and steps."""
        return len({plan for step in self.steps for plan in step.plans})

    @property
    def blocks_per_token(self) -> float:
        """Mean number of blocks that a fed token ran."""
        tokens = sum(step.tokens * len(step.executed) for step in self.steps)
        return sum(step.tokens * sum(step.executed) for step in self.steps) / max(tokens, 1)

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
        return float(sum(step.tokens * len(step.plans) for step in self.steps[1:]) / elapsed)

    def to_json(self) -> dict[str, Any]:
        """Plain values: steps with their rows' blocks, and the summary figures."""
        return {
            "num_blocks": self.num_blocks,
            "blocks_per_token": round(self.blocks_per_token, 3),
            "distinct_plans": self.distinct_plans,
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
