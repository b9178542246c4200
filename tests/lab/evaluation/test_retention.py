"""Retention is a ratio to full depth of the same weights, its error that of paired samples."""

import json
import random

import pytest

from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.tasks.retention import MeasuredCondition, retention
from buddy.lab.evaluation.tasks.tasks import SampleScores
from tests.tiny import tiny_buddy

FULL, HALF = plan_conditions(tiny_buddy(), ["routed"], ["1.0", "4 blocks"])


def measured(condition, scores, metric="acc"):
    """Points and samples of one task or several: lists of scores by task."""
    samples, points = {}, []
    for task, values in scores.items():
        for place, value in enumerate(values):
            samples[f"{task} {place}"] = SampleScores(
                task=task, doc_id=place, scores={metric: float(value)}
            )
        mean = sum(values) / len(values)
        points.append(condition.point(task, metric, mean, stderr=0.1, samples=len(values)))
    return MeasuredCondition(condition, points, samples)


def with_mean(run, task, value):
    tasks = [point["task"] for point in run.points]
    mean = run.condition.point(task, "acc", value, stderr=0.1, samples=0, tasks=tasks)
    return MeasuredCondition(run.condition, [*run.points, mean], run.scores)


def resampled(full, half, ratio):
    """Standard deviation of a ratio over samples that are drawn anew, rows in pairs."""
    draw, found = random.Random(0), []
    for _ in range(2000):
        drawn = {
            task: [draw.randrange(len(values)) for _ in values] for task, values in full.items()
        }
        found.append(ratio(full, drawn, half))
    mean = sum(found) / len(found)
    return (sum((each - mean) ** 2 for each in found) / (len(found) - 1)) ** 0.5


def test_what_is_kept_of_one_task_by_hand():
    full, half = {"piqa": [1, 1, 1, 0]}, {"piqa": [1, 0, 1, 0]}
    (kept,) = retention([measured(FULL, full), measured(HALF, half)])
    assert (kept["label"], kept["blocks"], kept["task"]) == ("routed", 4, "piqa")
    assert kept["value"] == pytest.approx(0.5 / 0.75)
    assert kept["full_depth"] == 0.75
    # What is left of 1, 0, 1, 0 after 2/3 of 1, 1, 1, 0: 1/3, -2/3, 1/3, 0.
    assert kept["stderr"] == pytest.approx(((1 / 9 + 4 / 9 + 1 / 9) / 3 / 4) ** 0.5 / 0.75)
    assert retention([measured(HALF, half)]) == []


def test_the_error_of_a_mean_of_tasks_is_that_of_samples_drawn_anew():
    draw = random.Random(1)
    full = {"piqa": [draw.random() < 0.7 for _ in range(90)]}
    full["boolq"] = [draw.random() < 0.6 for _ in range(60)]
    half = {
        task: [own and draw.random() < 0.8 for own in own_scores]
        for task, own_scores in full.items()
    }

    def mean(scores, places):
        return sum(
            sum(scores[task][place] for place in own) / len(own) for task, own in places.items()
        )

    whole = {task: list(range(len(values))) for task, values in full.items()}
    ends = [mean(scores, whole) / 2 for scores in (full, half)]
    runs = [
        with_mean(measured(condition, scores), "average", value)
        for condition, scores, value in zip((FULL, HALF), (full, half), ends, strict=True)
    ]
    # The metric of PIQA in the average is acc_norm.
    for run in runs:
        for sample in run.scores.values():
            sample.scores["acc_norm"] = sample.scores["acc"]
    kept = {point["task"]: point for point in retention(runs)}["average"]
    assert kept["value"] == pytest.approx(ends[1] / ends[0])
    expected = resampled(
        full, half, lambda full, drawn, half: mean(half, drawn) / mean(full, drawn)
    )
    assert kept["stderr"] == pytest.approx(expected, rel=0.1)


def test_mmlu_counts_rows_and_gsm8k_its_own_metric():
    full = {"mmlu_anatomy": [1, 1, 0], "mmlu_virology": [1, 0, 1, 0, 1, 0]}
    half = {"mmlu_anatomy": [1, 0, 0], "mmlu_virology": [0, 0, 1, 0, 1, 0]}
    runs = [
        with_mean(measured(condition, scores), "mmlu", sum(map(sum, scores.values())) / 9)
        for condition, scores in ((FULL, full), (HALF, half))
    ]
    kept = {point["task"]: point for point in retention(runs)}["mmlu"]
    assert kept["value"] == pytest.approx(3 / 5)
    assert kept["full_depth"] == pytest.approx(5 / 9)
    metric = "exact_match,flexible-extract"
    maths = [
        measured(condition, {"gsm8k": scores}, metric)
        for condition, scores in ((FULL, [1, 0, 1]), (HALF, [1, 0, 0]))
    ]
    (point,) = retention(maths)
    assert (point["metric"], point["value"]) == (metric, 0.5)


def test_of_nothing_nothing_is_kept_and_one_row_has_no_error():
    runs = [measured(FULL, {"gsm8k": [0, 0]}), measured(HALF, {"gsm8k": [0, 1]})]
    (point,) = retention(runs)
    assert (point["value"], point["stderr"], point["full_depth"]) == (None, None, 0)
    json.dumps(point, allow_nan=False)
    (alone,) = retention([measured(FULL, {"piqa": [1]}), measured(HALF, {"piqa": [1]})])
    assert (alone["value"], alone["stderr"]) == (1.0, None)


def test_metrics_that_are_no_accuracy_and_a_shallow_prompt_are_none_of_it():
    runs = [measured(each, {"wikitext": [3.0]}, "word_perplexity") for each in (FULL, HALF)]
    assert retention(runs) == []
    (phased,) = plan_conditions(tiny_buddy(), ["routed"], ["prefill:0.6,decode:1.0"])
    assert not measured(phased, {"piqa": [1]}).is_whole
    assert measured(FULL, {"piqa": [1]}).is_whole
