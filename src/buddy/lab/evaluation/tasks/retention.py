"""Retention: the share of full depth's accuracy that a condition keeps, of the same weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.samples import mean_and_error

if TYPE_CHECKING:
    from buddy.lab.evaluation.tasks.tasks import SampleScores

_ACCURACIES: Final = ("acc", "acc_norm", "exact_match")
"""Metrics that are shares of right answers; lm-eval puts the filter of an answer after a comma."""


@dataclass(frozen=True, slots=True)
class MeasuredCondition:
    """A condition and what was measured of it.

    Attributes:
        condition: Policy and budget.
        points: One a task and metric, and their means.
        scores: Of each sample, by task and content.
    """

    condition: Condition
    points: Sequence[dict[str, Any]]
    scores: "Mapping[str, SampleScores]"

    @property
    def is_whole(self) -> bool:
        """Whether every token runs every block."""
        budget, num_blocks = self.condition.budget, self.condition.policy.num_blocks
        return (
            not self.condition.is_free
            and budget.blocks == num_blocks
            and budget.prefill in (None, num_blocks)
        )


def retention(measured: Sequence[MeasuredCondition]) -> list[dict[str, Any]]:
    """What conditions keep of each accuracy of full depth; nothing where that was not measured.

    The standard error is that of a ratio of means over the same samples, to first order. Where full
    depth has no right answer at all, nothing can be kept, and the value is None.

    Args:
        measured: Conditions on the same samples.
    """
    whole = next((each for each in measured if each.is_whole), None)
    if whole is None:
        return []
    dense = {(point["task"], point["metric"]): point["value"] for point in whole.points}
    return [
        _kept(each, point, whole, dense[point["task"], point["metric"]])
        for each in measured
        if each is not whole
        for point in each.points
        if point["metric"].partition(",")[0] in _ACCURACIES
    ]


def _kept(
    own: MeasuredCondition, point: dict[str, Any], whole: MeasuredCondition, dense: float
) -> dict[str, Any]:
    if dense <= 0:
        return {**point, "value": None, "stderr": None, "full_depth": dense}
    share = point["value"] / dense
    squares, parts = 0.0, _parts(point, own.points)
    for task, metric, weight in parts:
        rests = [
            sample.scores[metric] - share * whole.scores[mark].scores[metric]
            for mark, sample in own.scores.items()
            if sample.task == task and metric in sample.scores
        ]
        _, error = mean_and_error(rests)
        squares += math.inf if error is None else (error * weight) ** 2
    error = math.sqrt(squares) / sum(weight for _, _, weight in parts) / dense
    stderr = error if math.isfinite(error) else None  # of a single row
    return {**point, "value": share, "stderr": stderr, "full_depth": dense}


def _parts(point: dict[str, Any], points: Sequence[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """Task, metric and weight of each figure that a point is the mean of."""
    if "tasks" not in point:
        return [(point["task"], point["metric"], 1.0)]
    if point["task"] == "average":
        return [(task, COMMONSENSE[task], 1.0) for task in point["tasks"]]
    rows = {other["task"]: float(other["samples"]) for other in points}
    return [(task, point["metric"], rows[task]) for task in point["tasks"]]
