"""Accuracy and perplexity: what is drawn is what was measured."""

import pytest

from buddy.errors import ResultError
from buddy.lab.plots.draw import accuracy, comparison, perplexity
from buddy.lab.plots.draw.perplexity import round_numbers
from tests.lab.plots.made import (
    L,
    comparison_record,
    perplexity_record,
    point,
    record,
    tasks_record,
)


def lines(figure):
    """Depths, values, and half the height of each error bar, by label."""
    axes = figure.axes[0]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    found = {}
    for label, bars in zip(labels, axes.containers, strict=False):
        line, _, spread = bars.lines
        ends = spread[0].get_segments() if spread else []
        halves = [(high[1] - low[1]) / 2 for low, high in ends]
        found[label] = (list(line.get_xdata()), list(line.get_ydata()), halves)
    return found


def levels(figure):
    """Heights of the dashed lines across."""
    return [
        float(line.get_ydata()[0])
        for line in figure.axes[0].lines
        if list(line.get_xdata()) == [0, 1]
    ]


def test_lines_are_the_measured_percent_with_one_standard_error():
    given = tasks_record(["routed", "sleb"])
    points = given["results"]["points"]
    drawn = lines(accuracy.draw([given]))
    assert list(drawn) == ["routed", "sleb"]
    for label, (depths, values, halves) in drawn.items():
        mine = [p for p in points if p["label"] == label]
        assert depths == [p["blocks"] for p in mine]
        assert values == pytest.approx([100 * p["value"] for p in mine])
        assert halves == pytest.approx([100 * p["stderr"] for p in mine])


def test_the_dense_model_is_a_level_and_no_line():
    figure = accuracy.draw([tasks_record(["sleb"])])
    assert levels(figure) == pytest.approx([52.0])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["sleb", "dense (30 blocks)"]


def test_checkpoints_with_dense_models_of_their_own_have_a_level_each():
    first = record("eval-tasks", {"points": [point("full", L, 0.5), point("a", 20, 0.4)]})
    other = record("eval-tasks", {"points": [point("full", L, 0.6), point("b", 20, 0.3)]})
    figure = accuracy.draw([first, other])
    assert levels(figure) == [50.0, 60.0]
    assert list(lines(figure)) == ["a", "b"]


def test_without_policy_full_the_level_is_what_all_agree_on():
    agreed = [point("a", L, 0.5), point("b", L, 0.5), point("a", 20, 0.4)]
    assert levels(accuracy.draw([record("eval-tasks", {"points": agreed})])) == [50.0]
    less = [point("c", L, 0.3, prefill_blocks=15), point("d", L, 0.2, mean_blocks=29.6)]
    assert levels(accuracy.draw([record("eval-tasks", {"points": [*agreed, *less]})])) == [50.0]
    differing = [point("a", L, 0.5), point("b", L, 0.6)]
    assert levels(accuracy.draw([record("eval-tasks", {"points": differing})])) == []


def test_points_of_several_records_make_one_line():
    first = record("eval-tasks", {"points": [point("a", 20, 0.4), point("a", 10, 0.2)]})
    other = record("eval-mmlu", {"points": [point("a", 15, 0.3), point("a", 20, 0.4)]})
    depths, values, _ = lines(accuracy.draw([first, other]))["a"]
    assert depths == [10, 15, 20]
    assert values == pytest.approx([20, 30, 40])


def test_a_point_without_a_standard_error_has_no_bar():
    points = [point("a", 10, 0.2, stderr=None), point("a", 20, 0.4, stderr=None)]
    figure = accuracy.draw([record("eval-tasks", {"points": points})])
    assert lines(figure)["a"][2] == []


def test_one_label_for_two_things_is_told_apart():
    points = [
        point("buddy", 20, 0.40, reroute="step"),
        point("buddy", 20, 0.35, reroute="prefill"),
        point("random", 20, 0.2, policy="random:0"),
        point("random", 20, 0.3, policy="random:1"),
    ]
    drawn = lines(accuracy.draw([record("eval-tasks", {"points": points})]))
    assert list(drawn) == [
        "buddy, recompute",
        "buddy, reuse",
        "random (random:0)",
        "random (random:1)",
    ]


def test_two_values_of_one_point_are_refused():
    points = [point("a", 20, 0.4), point("a", 20, 0.5)]
    with pytest.raises(ResultError, match=r"'a' has two values of acc on average at 20 blocks"):
        accuracy.draw([record("eval-tasks", {"points": points})])


def test_task_and_metric_are_chosen_or_must_be():
    points = [
        point("a", 20, 0.4, task="piqa"),
        point("a", 20, 0.5, task="boolq"),
        point("a", 20, 0.6, task="boolq", metric="acc_norm"),
    ]
    given = [record("eval-tasks", {"points": points})]
    assert lines(accuracy.draw(given, task="boolq"))["a"][1] == [50.0]
    figure = accuracy.draw(given, task="boolq", metric="acc_norm")
    assert lines(figure)["a"][1] == [60.0]
    assert figure.axes[0].get_ylabel() == "BoolQ normalised accuracy (%)"
    with pytest.raises(ResultError, match="choose a task with --task: there is task piqa, boolq"):
        accuracy.draw(given)
    with pytest.raises(ResultError, match="no metric 'f1' in these records: there is metric acc"):
        accuracy.draw(given, task="piqa", metric="f1")


def test_mmlu_stands_for_its_subjects():
    points = [point("a", 20, 0.3, task=f"mmlu_{i}") for i in range(57)]
    given = [record("eval-mmlu", {"points": points})]
    with pytest.raises(ResultError, match=r"task mmlu_0, .*, mmlu_11 and 45 more$"):
        accuracy.draw(given)
    points.append(point("a", 20, 0.4, task="mmlu"))
    assert lines(accuracy.draw(given))["a"][1] == [40.0]


def test_accuracy_draws_only_fractions():
    points = [point("a", 20, 31.0, metric="perplexity")]
    with pytest.raises(ResultError, match="draws fractions from 0 to 1, but 'a' has perplexity 31"):
        accuracy.draw([record("eval-tasks", {"points": points})])


def test_perplexity_is_as_measured_on_a_log_axis():
    given = perplexity_record(["routed"])
    figure = perplexity.draw([given])
    mine = [p for p in given["results"]["points"] if p["label"] == "routed"]
    _, values, halves = lines(figure)["routed"]
    assert values == pytest.approx([p["value"] for p in mine])
    assert halves == pytest.approx([p["stderr"] for p in mine])
    assert figure.axes[0].get_yscale() == "log"
    assert levels(figure) == pytest.approx([14.2])


def test_a_broken_models_perplexity_is_drawn_too():
    points = [
        point("a", depth, value, metric="perplexity", task="ptb", stderr=error)
        for depth, value, error in ((10, 1e304, 1e303), (20, 1e9, 5e9), (29, 20.0, 0.1))
    ]
    axes = perplexity.draw([record("eval-ppl", {"points": points})]).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert 3 <= len(labels) <= 7
    assert all(len(label) <= 6 for label in labels)
    low, high = axes.get_ylim()
    assert low < 20 < 1e304 < high


def test_perplexity_refuses_what_no_log_axis_shows():
    points = [point("a", 20, 0.0, metric="perplexity", task="ptb")]
    with pytest.raises(ResultError, match="a log axis takes values above 0"):
        perplexity.draw([record("eval-ppl", {"points": points})])


@pytest.mark.parametrize(
    ("low", "high"),
    [(13.9, 15.3), (13.0, 31.0), (10.0, 200.0), (9.0, 1100.0), (1.0, 1e6), (10.0, 1e12)],
)
def test_a_log_axis_has_a_few_round_numbers(low, high):
    ticks = round_numbers(low, high)
    assert 3 <= len(ticks) <= 7
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)
    assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)


def test_a_comparison_is_drawn_as_paired_differences_from_buddy():
    given = comparison_record(tasks=("alpaca", "tasks"))
    figure = comparison.draw([given], task="tasks")
    gaps = [gap for gap in given["results"]["above_buddy"] if gap["task"] == "tasks"]
    drawn = lines(figure)
    assert list(drawn) == ["(b) SLEB", "(c) SLEB", "(e) searched sets"]
    for label, (depths, values, halves) in drawn.items():
        mine = [gap for gap in gaps if gap["label"] == label]
        assert depths == [gap["blocks"] for gap in mine]
        assert values == pytest.approx([gap["difference"] for gap in mine])
        assert halves == pytest.approx([gap["stderr"] for gap in mine])
    assert levels(figure) == [0.0]
    with pytest.raises(ResultError, match="choose a task with --task: there is task alpaca, tasks"):
        comparison.draw([given])
