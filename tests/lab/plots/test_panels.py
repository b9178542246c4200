"""Panels and bars of `buddy reproduce`: they show what the record says."""

import pytest
from matplotlib.colors import to_hex

from buddy.errors import ResultError
from buddy.lab.plots.figures import draw
from tests.lab.plots.made import bars_record, panels_record, record


def test_the_papers_lines_are_dashed_and_have_the_colours_of_ours():
    figure = draw("panels", [panels_record(("a", "b"), panels=1)], width=6.6)
    (axes,) = figure.axes
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 4]
    drawn = [line for line in lines if line.get_linestyle() != "None"]
    assert len(drawn) == 4
    ours, paper = drawn[:2], drawn[2:]
    for own, theirs in zip(ours, paper, strict=True):
        assert to_hex(own.get_color()) == to_hex(theirs.get_color())
        assert own.get_linestyle() == "-"
        assert theirs.get_linestyle() == "--"
        assert list(own.get_ydata()) == list(theirs.get_ydata())
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["a", "b", "measured here", "reported by the paper"]


def test_ours_alone_need_no_word_of_the_paper():
    figure = draw("panels", [panels_record(("a",), panels=2, paper=False)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]


def test_bars_are_laid_end_to_end_in_the_order_of_the_parts():
    figure = draw("bars", [bars_record(rows=2, parts=("a", "b"))])
    (axes,) = figure.axes
    spans = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert spans == [(0, 50), (0, 50), (50, 50), (50, 50)]


LABELS = {"title": "x", "x_label": "x", "y_label": "y"}
BARS = {"x_label": "x", "parts": ["a"], "rows": [{"label": "x", "values": [0.0]}]}
WRONG = [
    ("panels", {}, "panels"),
    ("panels", {"panels": [{**LABELS, "lines": []}]}, "lines"),
    ("bars", {"bars": {**BARS, "parts": []}}, "parts"),
    ("bars", {"bars": BARS}, "nothing"),
]


@pytest.mark.parametrize(("figure", "results", "says"), WRONG)
def test_a_record_that_lacks_something_is_told_so(figure, results, says):
    with pytest.raises(ResultError, match=says):
        draw(figure, [record("reproduce-x", results)])
