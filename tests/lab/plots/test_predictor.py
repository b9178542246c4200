"""The predictor figure shows the record's curves."""

import pytest

from buddy.errors import ResultError
from buddy.lab.plots.draw import predictor
from tests.lab.plots.made import predictor_record


def test_each_panel_shows_its_curve_and_the_best_constant():
    given = predictor_record()
    panels = predictor.draw([given]).axes
    curve = given["results"]["curve"]
    for axes, name in zip(panels, ("loss", "reward", "cross_entropy", "entropy"), strict=True):
        line = axes.lines[0]
        assert list(line.get_xdata()) == curve["step"]
        assert list(line.get_ydata()) == curve[name]
        assert len(axes.lines) == 1 + (name == "reward")
    assert panels[1].lines[1].get_ydata()[0] == -7.5


def test_a_single_run_shows_what_each_source_gets_most_first():
    given = predictor_record()
    given["results"]["evaluation"] |= {
        "constant_blocks": 18,
        "by_source": {"boolq": {"blocks": 14.5}, "alpaca": {"blocks": 25.0}},
    }
    *curves, bars = predictor.draw([given]).axes
    assert [len(axes.patches) for axes in curves] == [0] * 4
    assert [bar.get_width() for bar in bars.patches] == [25.0, 14.5]
    assert [text.get_text() for text in bars.get_yticklabels()] == ["alpaca", "boolq"]
    assert bars.yaxis_inverted()
    assert bars.lines[0].get_xdata()[0] == 18
    two = predictor.draw([given, predictor_record(lambda_cost=1.0)])
    assert len(two.axes) == 4
    given["results"]["evaluation"]["by_source"] = [1]
    with pytest.raises(ResultError, match="evaluation: by_source: expected a table, got"):
        predictor.draw([given])


def test_a_curve_that_hardly_moves_has_its_values_at_its_ticks():
    given = predictor_record()
    curve = given["results"]["curve"]
    curve["entropy"] = [3.3322 + 1e-7 * step for step in range(len(curve["step"]))]
    figure = predictor.draw([given])
    figure.draw_without_rendering()
    labels = [text.get_text() for text in figure.axes[3].get_yticklabels()]
    assert all(label.startswith("3.332") for label in labels)


def test_runs_are_named_by_what_differs():
    figure = predictor.draw([predictor_record(), predictor_record(lambda_cost=1.0)])
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["grpo.lambda_cost 0.05", "grpo.lambda_cost 1.0"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2, 2]


def test_what_cannot_be_told_apart_or_read_is_refused():
    with pytest.raises(ResultError, match="same settings"):
        predictor.draw([predictor_record()] * 2)
    spoilt = predictor_record()
    spoilt["results"]["curve"]["reward"].pop()
    with pytest.raises(ResultError, match="curve: reward must be 20 long, got 19"):
        predictor.draw([spoilt])
    del spoilt["results"]["curve"]
    with pytest.raises(ResultError, match="results lacks curve"):
        predictor.draw([spoilt])
