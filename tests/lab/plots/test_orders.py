"""Ranks, contexts and importance: the figures show the records' numbers."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from buddy.errors import ResultError
from buddy.lab.plots.draw import context, importance, ranks
from buddy.lab.plots.draw.importance import NEVER, normalised
from tests.lab.plots.made import (
    context_record,
    importance_record,
    ranks_record,
    record,
    sleb_record,
)


def box_medians(axes):
    """Heights of the black lines, one a box, by block."""
    lines = [line for line in axes.lines if line.get_color() == "#000000"]
    return {round(np.mean(line.get_xdata())): float(line.get_ydata()[0]) for line in lines}


def test_boxes_have_the_records_medians_and_quartiles():
    given = ranks_record(num_blocks=12, inputs=9)
    figure = ranks.draw([given])
    for axes, series in zip(figure.axes, given["results"]["series"], strict=True):
        table = np.array(series["ranks"])
        assert box_medians(axes) == dict(enumerate(np.median(table, axis=0)))
        for block, box in enumerate(axes.patches):
            heights = box.get_path().vertices[:4, 1]
            low, high = np.percentile(table[:, block], (25, 75))
            assert (min(heights), max(heights)) == pytest.approx((low, high))


def test_panels_are_indicator_by_text():
    titles = [axes.get_title(loc="left") for axes in ranks.draw([ranks_record(6, 3)]).axes]
    assert titles == ["ΔPPL, WikiText-2", "Taylor, PTB"]


def test_two_texts_of_one_file_name_are_told_apart():
    record = ranks_record(6, 3, [("taylor", "a/valid.txt"), ("taylor", "b/valid.txt")])
    titles = [axes.get_title(loc="left") for axes in ranks.draw([record]).axes]
    assert titles == ["Taylor, a/valid", "Taylor, b/valid"]


def test_ranks_that_do_not_fit_together_are_refused():
    with pytest.raises(ResultError, match="models with 6 and 8 blocks"):
        ranks.draw([ranks_record(6, 3, [("taylor", "ptb")]), ranks_record(8, 3, [("fisher", "x")])])
    with pytest.raises(ResultError, match="given 'Taylor, PTB' twice"):
        ranks.draw([ranks_record(6, 3, [("taylor", "ptb")])] * 2)
    ragged = record(
        "observe-ranks",
        {"series": [{"indicator": "taylor", "text": "ptb", "ranks": [[0, 1], [1]]}]},
    )
    with pytest.raises(ResultError, match=r"series\[0\]: ranks\[1\] must be 2 long, got 1"):
        ranks.draw([ragged])


def test_context_shows_ranks_and_their_change():
    given = context_record(num_blocks=10)
    figure = context.draw([given])
    upper, lower = figure.axes[:2]
    table = np.array(given["results"]["ranks"])
    shown = np.array(upper.collections[0].get_array()).reshape(table.shape)
    np.testing.assert_allclose(shown, table)
    change = np.array(lower.collections[0].get_array()).reshape(len(table) - 1, 10)
    np.testing.assert_allclose(change, table[1:] - table[0])
    # No change is the middle of the colours, whichever way the largest goes.
    low, high = lower.collections[0].get_clim()
    assert -low == high == pytest.approx(np.abs(change).max())


def test_dots_mark_changes_of_over_two_standard_errors():
    results = {
        "indicator": "taylor",
        "contexts": [256, 512],
        "ranks": [[0.0, 1.0, 2.0], [2.8, 1.0, 4.9]],
        "stderr": [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]],
    }
    # By hand: sqrt(1 + 1) * 2 = 2.83, which 2.8 does not exceed and 2.9 does.
    figure = context.draw([record("observe-context", results)])
    dots = figure.axes[1].collections[1].get_offsets()
    assert dots.tolist() == [[2.0, 0.0]]


def test_context_takes_one_record_of_ascending_contexts():
    with pytest.raises(ResultError, match="draws one record, got 2"):
        context.draw([context_record(6)] * 2)
    for contexts in ((512, 256), (256, 256), (256,)):
        with pytest.raises(ResultError, match=r"contexts must be (ascending|at least 2 long)"):
            context.draw([context_record(6, contexts)])
    short = context_record(6, (256, 512))
    short["results"]["stderr"].pop()
    with pytest.raises(ResultError, match="results: stderr must be 2 long, got 1"):
        context.draw([short])


def test_importance_shows_places_in_the_order_and_who_is_in_none():
    given = importance_record("taylor", num_blocks=6)
    order = given["results"]["removal_order"]
    figure = importance.draw([given])
    axes = figure.axes[1]
    places = np.ma.filled(axes.collections[0].get_array().astype(float), np.nan).ravel()
    assert [int(np.flatnonzero(places == place)[0]) for place in range(4)] == order
    assert np.flatnonzero(np.isnan(places)).tolist() == [0, 5]
    assert axes.get_facecolor() == to_rgba(NEVER)


def test_scores_are_normalised_as_in_the_paper():
    # By hand: log1p of 0, e-1, e^2-1 is 0, 1, 2; median 1, quartiles 0.5 and 1.5.
    scores = normalised([0.0, math.e - 1, math.e**2 - 1])
    expected = [1 / (1 + math.e), 0.5, 1 / (1 + 1 / math.e)]
    assert scores.tolist() == pytest.approx(expected)
    # log1p of 0, 1, 1, 1 and much; the quartiles meet, so the unit is 1: 1 / (1 + e^ln2) = 1 / 3.
    clipped = 1 / (1 + math.exp(-3.5))
    found = normalised([-5.0, 1.0, 1.0, 1.0, 1e30]).tolist()
    assert found == pytest.approx([1 / 3, 0.5, 0.5, 0.5, clipped])
    assert normalised([3.0, 3.0]).tolist() == [0.5, 0.5]


def test_indicators_of_one_kind_are_told_apart_by_their_settings():
    figure = importance.draw(
        [
            importance_record("taylor", 8, protect="none"),
            importance_record("taylor", 8, protect="ends"),
            sleb_record(8),
        ]
    )
    labels = [label.get_text().replace("\n", " ") for label in figure.axes[1].get_yticklabels()]
    assert labels == ["Taylor, protect none", "Taylor, protect ends", "SLEB"]
    with pytest.raises(ResultError, match="given 'Taylor' twice, and nothing tells the two apart"):
        importance.draw([importance_record("taylor", 8)] * 2)


def test_a_search_alone_has_its_order_alone():
    figure = importance.draw([sleb_record(8)])
    assert figure.axes[0].get_title(loc="left").startswith("Place")
    assert figure.axes[0].collections[0].get_array().size == 8


def test_a_search_that_stopped_early_is_of_the_whole_model():
    given = sleb_record(8) | {"model": {"num_blocks": 8, "base": "0" * 64}}
    del given["results"]["removal_order"][2:]
    figure = importance.draw([given])
    assert figure.axes[0].collections[0].get_array().size == 8
    with pytest.raises(ResultError, match="models with 6 and 8 blocks"):
        importance.draw([importance_record("taylor", 6), given])
    given["model"]["num_blocks"] = "8"
    with pytest.raises(ResultError, match="record 1, model: num_blocks: expected int"):
        importance.draw([given])


def test_importance_of_models_of_different_depths_is_refused():
    with pytest.raises(ResultError, match="models with 6 and 8 blocks"):
        importance.draw([importance_record("taylor", 6), importance_record("fisher", 8)])
    with pytest.raises(ResultError, match=r"names block 8, but other records .* 6 blocks"):
        importance.draw([importance_record("taylor", 6), sleb_record(10)])
    twice = record("importance-sleb", {"removal_order": [1, 2, 2]})
    with pytest.raises(ResultError, match="removal_order must name different blocks"):
        importance.draw([twice])
