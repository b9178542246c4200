"""The retention figure compares what the predictor keeps with the whole model."""

import pytest

from buddy.errors import ResultError
from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.plots.draw import retention
from buddy.lab.plots.names import text_name
from tests.lab.plots.made import auto_record, point, record, tasks_record


def test_bars_are_shares_of_the_whole_model_and_mean_budgets_most_spent_first():
    kept, spent = retention.draw([auto_record()]).axes
    names = ["ARC-Challenge", "BoolQ", "PIQA", "Average"]
    assert [text.get_text() for text in kept.get_yticklabels()] == names
    assert [bar.get_width() for bar in kept.patches] == pytest.approx([82.0, 86.0, 90.0, 78.0])
    assert [bar.get_width() for bar in spent.patches] == [20.5, 19.5, 18.5, 21.5]
    assert kept.yaxis_inverted()


def test_a_tasks_bar_has_the_metric_that_the_average_takes():
    given = auto_record()
    budget = {"budget": "auto", "mean_blocks": 18.5}
    points = given["results"]["points"]
    points.insert(0, point("routed", 30, 0.4, task="piqa", metric="acc"))
    points.insert(1, point("routed auto", 18, 0.1, task="piqa", metric="acc", **budget))
    kept, _ = retention.draw([given]).axes
    assert [bar.get_width() for bar in kept.patches] == pytest.approx([82.0, 86.0, 90.0, 78.0])


def test_every_task_of_the_average_has_a_readers_name():
    assert all(text_name(task) != task for task in COMMONSENSE)


def test_another_metric_may_be_chosen():
    points = auto_record()["results"]["points"]
    points.append(point("routed", 30, 0.4, task="samsum", metric="rouge1"))
    found = {"budget": "auto", "mean_blocks": 20.0}
    points.append(point("routed auto", 20, 0.1, task="samsum", metric="rouge1", **found))
    given = record("eval-tasks", {"points": points, "execution": []})
    kept, _ = retention.draw([given], metric="rouge1").axes
    assert [bar.get_width() for bar in kept.patches] == [25.0]


def test_subjects_give_way_to_their_mean():
    points = []
    for task in ("mmlu_anatomy", "mmlu"):
        points.append(point("routed", 30, 0.5, task=task))
        points.append(point("routed auto", 20, 0.4, task=task, budget="auto", mean_blocks=20.0))
    kept, _ = retention.draw([record("eval-tasks", {"points": points, "execution": []})]).axes
    assert [text.get_text() for text in kept.get_yticklabels()] == ["MMLU"]


def test_gsm8k_stands_beside_the_eight_tasks_in_its_own_metric():
    for others in ([], auto_record()["results"]["points"]):
        maths = [
            point(label, 30, value, task="gsm8k", metric=metric, **ran)
            for metric, kept in (("exact_match,flexible-extract", 0.3), ("exact_match,strict", 0.1))
            for label, value, ran in (
                ("routed", 0.4, {}),
                ("routed auto", kept, {"budget": "auto", "mean_blocks": 20.0}),
            )
        ]
        given = record("eval-gsm8k", {"points": [*others, *maths], "execution": []})
        kept, _ = retention.draw([given]).axes
        names = [text.get_text() for text in kept.get_yticklabels()]
        assert kept.patches[names.index("GSM8K")].get_width() == pytest.approx(75)


def test_records_without_auto_are_refused():
    with pytest.raises(ResultError, match=r"both with -b auto and with every block.*-b auto -b 1"):
        retention.draw([tasks_record()])


def test_two_predictors_or_nothing_to_keep_are_refused():
    given = auto_record()
    points = given["results"]["points"]
    points.append({**points[1], "label": "other auto", "value": 0.3})
    with pytest.raises(ResultError, match="one predictor, got other auto and routed auto"):
        retention.draw([given])
    points.pop()
    points[0]["value"] = 0.0
    with pytest.raises(ResultError, match="piqa scores nothing with every block"):
        retention.draw([given])
    points[0] |= {"value": 0.5, "num_blocks": 32}
    with pytest.raises(ResultError, match="30 and 32 blocks"):
        retention.draw([given])


def test_a_prompt_of_fewer_blocks_is_not_the_whole_model():
    given = auto_record()
    phased = point("routed, prompt at 15", 30, 0.1, task="boolq", prefill_blocks=15)
    given["results"]["points"].append(phased)
    kept, _ = retention.draw([given]).axes
    assert [bar.get_width() for bar in kept.patches] == pytest.approx([82.0, 86.0, 90.0, 78.0])


def test_two_whole_models_are_refused():
    given = auto_record()
    whole = point("full", 30, 0.5, task="boolq")
    same, other = (record("eval-tasks", {"points": [whole | {"value": v}]}) for v in (0.5, 0.4))
    assert retention.draw([given, same])
    with pytest.raises(ResultError, match=r"boolq has two values with every block, 0\.5 and 0\.4"):
        retention.draw([given, other])
