"""Figures of a record from the times of a speed measurement."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from buddy.engine.probe import BLOCKS
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.speed.breakdown import PIECES

Phase = Literal["prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed prefill and one timed generation.

    Attributes:
        latency_s: Of the prefill, and the median of the decode steps.
        distinct_plans: Over all rows and steps of the generation.
        engine: Who ran its decode steps; None for transformers' own.
        mean_blocks: Blocks that a token ran; None for transformers' own.
    """

    latency_s: dict[Phase, float]
    distinct_plans: int
    engine: str | None = None
    mean_blocks: dict[Phase, float] | None = None


@dataclass(slots=True)
class Series:
    """What was measured under one condition, round by round.

    Attributes:
        condition: None for transformers' own `generate`.
        samples: Of the timed passes.
        pieces: Of the profiled ones, seconds of each piece.
    """

    condition: Condition | None
    samples: list[Sample] = field(default_factory=list)
    pieces: dict[Phase, list[dict[str, float]]] = field(
        default_factory=lambda: {phase: [] for phase in PHASES}
    )

    @property
    def is_dense(self) -> bool:
        """Whether it is Buddy at full depth, in the prompt and after it."""
        condition = self.condition
        if condition is None or condition.is_free or condition.budget.prefill is not None:
            return False
        return condition.blocks == condition.policy.num_blocks

    def depth(self, phase: Phase, num_blocks: int) -> dict[str, Any]:
        """Blocks of a token; where no budget has fixed them, the mean over all rounds."""
        if self.condition is None:
            return {"blocks": num_blocks}
        means = [sample.mean_blocks[phase] for sample in self.samples if sample.mean_blocks]
        free = self.condition.spent(statistics.fmean(means)) if means else {}
        prompt, answer = self.condition.budget.prefill, self.condition.blocks
        if prompt is None:
            return {"blocks": answer, **free}
        return {"blocks": prompt if phase == "prefill" else answer, "prefill_blocks": prompt}

    def latencies_s(self, phase: Phase) -> list[float]:
        """Latency of each round."""
        return [sample.latency_s[phase] for sample in self.samples]

    def shares(self, phase: Phase) -> dict[str, float] | None:
        """Each piece's part of the time of all rounds, 1 in sum; None if none was profiled."""
        rounds = self.pieces[phase]
        if not rounds:
            return None
        seconds = {piece: sum(seconds[piece] for seconds in rounds) for piece in PIECES}
        total = sum(seconds.values())
        return {piece: part / total for piece, part in seconds.items()}


def ideal_speedup(
    blocks: int | float, num_blocks: int, *, per_block_s: float, outside_s: float
) -> float:
    """How much faster `blocks` blocks are than all, if a skipped block costs nothing.

    Args:
        blocks: That run.
        num_blocks: Of the model.
        per_block_s: Time of one block.
        outside_s: Time of a dense pass outside its blocks.
    """
    return (outside_s + num_blocks * per_block_s) / (outside_s + blocks * per_block_s)


def to_results(
    series: Sequence[Series], *, num_blocks: int, batch: int, context: int
) -> dict[str, Any]:
    """The `cells` of an `eval-speed` record, and the rounds that they were made from.

    Args:
        series: Full depth among them; transformers' own, if it ran.
        num_blocks: Of the model.
        batch: Rows.
        context: Tokens of a prompt.
    """
    dense = next(own for own in series if own.is_dense)
    baseline = next((own for own in series if own.condition is None), None)
    cells = []
    for own in series:
        for phase in PHASES:
            depth = own.depth(phase, num_blocks)
            latencies = own.latencies_s(phase)
            latency_s = statistics.median(latencies)
            cells.append(
                {
                    **_name(own),
                    "phase": phase,
                    **depth,
                    "num_blocks": num_blocks,
                    "batch": batch,
                    "context": context,
                    "tokens_per_s": batch * (context if phase == "prefill" else 1) / latency_s,
                    "latency_ms": 1e3 * latency_s,
                    "latency_ms_min": 1e3 * min(latencies),
                    "latency_ms_max": 1e3 * max(latencies),
                    "speedup_own_dense": _speedup(own, dense, phase),
                    "speedup_transformers": baseline and _speedup(own, baseline, phase),
                    "ideal_speedup": _ideal(
                        dense, phase, float(depth.get("mean_blocks", depth["blocks"])), num_blocks
                    ),
                    "shares": own.shares(phase),
                }
            )
    return {"cells": cells, "rounds": [_rounds(own) for own in series]}


def _name(series: Series) -> dict[str, Any]:
    if series.condition is None:
        return {"label": "transformers", "policy": None}
    return {"label": "buddy", "policy": series.condition.spec}


def _speedup(series: Series, other: Series, phase: Phase) -> float:
    """The median over the rounds of how much faster it was than the other one."""
    pairs = zip(series.latencies_s(phase), other.latencies_s(phase), strict=True)
    return statistics.median(theirs / own for own, theirs in pairs)


def _ideal(dense: Series, phase: Phase, blocks: float, num_blocks: int) -> float:
    shares = dense.shares(phase)
    assert shares is not None
    latency_s = statistics.median(dense.latencies_s(phase))
    in_blocks_s = latency_s * shares[BLOCKS]
    return ideal_speedup(
        blocks,
        num_blocks,
        per_block_s=in_blocks_s / num_blocks,
        outside_s=latency_s - in_blocks_s,
    )


def _rounds(series: Series) -> dict[str, Any]:
    return {
        **_name(series),
        "name": series.condition.label if series.condition else "transformers",
        "blocks": series.condition and series.condition.blocks,
        "engine": series.samples[-1].engine,
        "distinct_plans": [sample.distinct_plans for sample in series.samples],
        **{
            f"{phase}_ms": [1e3 * seconds for seconds in series.latencies_s(phase)]
            for phase in PHASES
        },
    }
