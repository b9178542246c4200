"""Tasks of lm-evaluation-harness under every condition, one log and one set of figures."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from lm_eval.evaluator import evaluate

from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.evaluation.against import Against, EarlierCondition, mean_difference
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.execution import execution_rates
from buddy.lab.evaluation.phases import PhaseCounts
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.evaluation.tasks.harness import BuddyLM
from buddy.lab.evaluation.tasks.retention import MeasuredCondition, retention

_BOOTSTRAPS = 1000
OnCondition = Callable[[Condition], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleScores:
    """The scores of a sample, as they are logged."""

    task: str
    """The task's name in lm-eval."""
    doc_id: int
    """Its number in the task."""
    scores: dict[str, float]
    """Scores by metric."""


def run_tasks(
    lm: BuddyLM,
    conditions: Sequence[Condition],
    loaded: dict[str, Any],
    *,
    limit: int | None = None,
    seed: int = 1234,
    chat_template: bool = False,
    against: Against | None = None,
    on_condition: OnCondition = lambda condition: None,
) -> dict[str, Any]:
    """Evaluate every condition on every task.

    Args:
        lm: Its log, if any, keeps samples and gives back those it has.
        conditions: One after another.
        loaded: As `load_tasks` gives it.
        limit: At most this many rows of each task.
        seed: Of few-shot sampling.
        chat_template: Put each prompt into the tokenizer's chat template.
        against: An earlier run on the same rows, to take differences from.
        on_condition: Told when one begins.

    Returns:
        `points`, one a metric; `kept`, the share of each accuracy at full depth, where that was
        measured; `execution`, how often each block ran; and `against`, the difference from the
        earlier run.

    Raises:
        BudgetError: A condition cannot be measured as `lm` is set.
        ResultError: The earlier run is of other budgets or rows.
    """
    measured: list[MeasuredCondition] = []
    execution: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    # Before anything is measured.
    for condition in conditions:
        lm.check_condition(condition)
    earlier_runs = [[] if against is None else against.beside(own) for own in conditions]
    for condition, beside in zip(conditions, earlier_runs, strict=True):
        on_condition(condition)
        lm.set_condition(condition)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed)
        evaluated = cast(
            dict[str, Any],
            evaluate(
                lm,
                loaded,
                limit=limit,
                bootstrap_iters=_BOOTSTRAPS,
                apply_chat_template=chat_template,
                fewshot_as_multiturn=chat_template,
            ),
        )
        sample_scores = _scores_by_sample(evaluated["samples"])
        if lm.log is not None:
            _log_missing(lm.log, condition, sample_scores)
        depths = {task: lm.depth(task) for task in loaded["tasks"]}
        phases = {task: PhaseCounts.total(lm.phases.get(task, ())) for task in loaded["tasks"]}
        for earlier in beside:
            differences += _differences(condition, sample_scores, earlier, depths)
        points = _points(condition, evaluated, depths, phases)
        measured.append(MeasuredCondition(condition, points, sample_scores))
        execution += execution_rates(condition, lm.execution, of_prompts=True)
    return {
        "points": [point for each in measured for point in each.points],
        "kept": retention(measured),
        "execution": execution,
        "against": differences,
    }


def _scores_by_sample(samples: dict[str, list[dict[str, Any]]]) -> dict[str, SampleScores]:
    """Scores of every sample by task and content: its number may be another question's."""
    by_mark = {}
    for task, rows in samples.items():
        for row in rows:
            mark = f"{row['doc_id']} {row['filter']} {row['doc_hash']} {row['prompt_hash']}"
            suffix = "" if row["filter"] == "none" else f",{row['filter']}"
            # Some metrics of corpora are no number of one sample.
            values = {f"{name}{suffix}": row[name] for name in row["metrics"]}
            scores = {
                name: float(value)
                for name, value in values.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
            by_mark[f"{task} {mark}"] = SampleScores(task=task, doc_id=row["doc_id"], scores=scores)
    return by_mark


def _log_missing(
    log: SampleLog, condition: Condition, sample_scores: dict[str, SampleScores]
) -> None:
    for mark, scores in sample_scores.items():
        key = f"{condition.key} {mark}"
        if log.find(key, SampleScores) is None:
            log.add(key, **asdict(scores))


def _differences(
    condition: Condition,
    sample_scores: dict[str, SampleScores],
    earlier: EarlierCondition,
    depths: dict[str, float],
) -> list[dict[str, Any]]:
    """How far this run is above the earlier one, by task and metric, and on average."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    theirs = earlier.rows(list(sample_scores), SampleScores)
    for own, other in zip(sample_scores.values(), theirs, strict=True):
        for metric in own.scores.keys() & other.scores.keys():
            pairs.setdefault((own.task, metric), []).append(
                (own.scores[metric], other.scores[metric])
            )
    points = []
    for (task, metric), both in sorted(pairs.items()):
        value, error = mean_difference(both)
        rest = {**condition.spent(depths[task]), **earlier.about}
        points.append(condition.point(task, metric, value, stderr=error, samples=len(both), **rest))
    return [*points, *({**mean, **earlier.about} for mean in _means(condition, points))]


def _points(
    condition: Condition,
    evaluated: dict[str, Any],
    depths: dict[str, float],
    phases: dict[str, PhaseCounts],
) -> list[dict[str, Any]]:
    points = []
    for task, depth in depths.items():
        samples = evaluated["n-samples"][task]["effective"]
        figures = evaluated["results"][task]
        for name, value in figures.items():
            metric, comma, source = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = figures.get(f"{metric}_stderr,{source}")
            points.append(
                condition.point(
                    task,
                    metric if source == "none" else name,
                    value,
                    stderr=error if isinstance(error, float) else None,
                    samples=samples,
                    **condition.spent(depth),
                    **phases[task].fields(),
                )
            )
    return [*points, *_means(condition, points)]


def _means(condition: Condition, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The average of the commonsense tasks, each task alike; MMLU's over all its rows."""
    chosen = [point for point in points if COMMONSENSE.get(point["task"]) == point["metric"]]
    means = []
    if len(chosen) > 1:
        means.append(_mean(condition, "average", chosen, [1.0] * len(chosen)))
    subjects = [p for p in points if p["task"].startswith("mmlu_") and p["metric"] == "acc"]
    if subjects:
        weights = [float(point["samples"]) for point in subjects]
        means.append(_mean(condition, "mmlu", subjects, weights))
    return means


def _mean(
    condition: Condition, task: str, points: list[dict[str, Any]], weights: list[float]
) -> dict[str, Any]:
    total = sum(weights)
    pairs = list(zip(points, weights, strict=True))
    value = sum(point["value"] * weight for point, weight in pairs) / total
    # An error that is not known, as of a single row, leaves that of the mean unknown.
    is_known = all(point["stderr"] is not None for point in points)
    errors = [point["stderr"] * weight for point, weight in pairs] if is_known else []
    depth = sum(p.get("mean_blocks", p["blocks"]) * weight for p, weight in pairs) / total
    return condition.point(
        task,
        "acc",
        value,
        stderr=math.hypot(*errors) / total if is_known else None,
        samples=sum(point["samples"] for point in points),
        tasks=[point["task"] for point in points],
        **condition.spent(depth),
    )
