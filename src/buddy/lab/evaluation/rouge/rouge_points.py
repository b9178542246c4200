"""Figures of a record from answers made both ways, differences taken answer by answer."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.phases import PhaseCounts
from buddy.lab.evaluation.samples import mean_and_error

METRICS: Final = ("rouge1", "rouge2", "rougeL")
TASK: Final = "samsum"
Way = Literal["step", "prefill"]
WAYS: Final[dict[Way, str]] = {"step": "recompute", "prefill": "reuse"}
"""When an answer is routed, as `generate` takes it, and what the paper calls it."""

Plan = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """An answer, as it is logged."""

    task: str
    """`samsum`."""
    text: str
    """The answer as it was scored."""
    scores: dict[str, float]
    """F-measures, 0 to 1."""
    plans: dict[str, int]
    """Tokens that each plan made: a hexadecimal number, the first block its lowest bit."""
    phase_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens that followed and were fed, by phase; none where thinking has no budget of its own."""
    phase_blocks: dict[str, int] = field(default_factory=dict)
    """Blocks that these ran."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        text: As it was scored.
        scores: F-measures, 0 to 1.
        plans: How many of its tokens each plan made.
        phases: What its tokens ran, where thinking has a budget of its own.
    """

    text: str
    scores: dict[str, float]
    plans: dict[Plan, int]
    phases: PhaseCounts = field(default_factory=PhaseCounts)

    @property
    def tokens(self) -> int:
        """How many were generated, its end included."""
        return sum(self.plans.values())

    def to_log(self) -> Logged:
        """The answer as it is logged."""
        plans = {f"{sum(1 << b for b in plan):x}": count for plan, count in self.plans.items()}
        return Logged(
            task=TASK,
            text=self.text,
            scores=self.scores,
            plans=plans,
            phase_tokens=self.phases.tokens,
            phase_blocks=self.phases.blocks,
        )

    @classmethod
    def from_log(cls, logged: Logged) -> "Answer":
        """The reverse of `to_log`."""
        plans = {_bits(int(mask, 16)): count for mask, count in logged.plans.items()}
        phases = PhaseCounts(logged.phase_tokens, logged.phase_blocks)
        return cls(logged.text, logged.scores, plans, phases)


def _bits(mask: int) -> Plan:
    return tuple(block for block in range(mask.bit_length()) if mask >> block & 1)


def ways_of(condition: Condition) -> tuple[Way | None, ...]:
    """Both ways; None where they are the same, as the input has no say in the plan."""
    return (None,) if condition.fixed_blocks() is not None else tuple(WAYS)


def to_results(
    condition: Condition, answers: Mapping[Way | None, Sequence[Answer]]
) -> dict[str, list[dict[str, Any]]]:
    """Figures of one condition.

    Args:
        condition: Under which the answers were made.
        answers: By way, the same dialogues in the same order.

    Returns:
        `points`: mean scores, with the way as `reroute`. `differences`: mean of recompute minus
        reuse, of the same dialogue, and its standard error. `execution`: how often each block
        ran, an answer's tokens weighing 1 in all, and the mean number of plans in an answer.
    """
    results: dict[str, list[dict[str, Any]]] = {"points": [], "differences": [], "execution": []}
    for way, made in answers.items():
        phases = PhaseCounts.total(answer.phases for answer in made)
        ran = {**condition.spent(_depth(made)), **phases.fields()}
        for metric in METRICS:
            value, error = mean_and_error([answer.scores[metric] for answer in made])
            rest = {**ran, "stderr": error, "samples": len(made), "reroute": way}
            results["points"].append(condition.point(TASK, metric, value, **rest))
        results["execution"].append(_execution(condition, way, made))
    if len(answers) > 1:
        for metric in METRICS:
            pairs = zip(answers["step"], answers["prefill"], strict=True)
            value, error = mean_and_error([a.scores[metric] - b.scores[metric] for a, b in pairs])
            rest = {"stderr": error, "samples": len(answers["step"]), "minus": "prefill"}
            point = condition.point(TASK, metric, value, reroute="step", **rest)
            results["differences"].append(point)
    return results


def _depth(answers: Sequence[Answer]) -> float:
    """Blocks of a generated token on average."""
    spent = sum(len(plan) * count for answer in answers for plan, count in answer.plans.items())
    return spent / sum(answer.tokens for answer in answers)


def _execution(condition: Condition, way: Way | None, answers: Sequence[Answer]) -> dict[str, Any]:
    rates = [0.0] * condition.policy.num_blocks
    for answer in answers:
        for plan, count in answer.plans.items():
            for block in plan:
                rates[block] += count / answer.tokens / len(answers)
    described = condition.describe()
    if way is not None:
        described["label"] = f"{described['label']}, {WAYS[way]}"
    return {
        **described,
        **condition.spent(_depth(answers)),
        "task": TASK,
        "reroute": way,
        "rates": [min(1.0, rate) for rate in rates],
        "inputs": len(answers),
        "distinct_plans": len({plan for answer in answers for plan in answer.plans}),
        "distinct_plans_per_answer": statistics.fmean(len(answer.plans) for answer in answers),
        "tokens_per_answer": statistics.fmean(answer.tokens for answer in answers),
    }
