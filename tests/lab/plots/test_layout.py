"""Nothing written overlaps, nothing is cut off, and a column is a column wide."""

from itertools import pairwise

import pytest

from buddy.errors import ResultError
from buddy.lab.plots.figures import FIGURES, draw
from buddy.lab.plots.style import look
from tests.lab.plots import made
from tests.lab.plots.layout import clipped, drawn_texts, overlapping

MANY = [f"policy number {i}" for i in range(12)]
LONG = ["a label that goes on and on, longer than any column of a paper is wide", "b"]
FOUR = [(indicator, text) for indicator in ("delta-ppl", "taylor") for text in ("wikitext2", "ptb")]
CASES = {
    **{name: (name, records, {}) for name, records in made.EXAMPLES.items()},
    "many labels": ("accuracy", [made.tasks_record(MANY)], {}),
    "long label and title": (
        "accuracy",
        [made.tasks_record(LONG)],
        {"title": "A title so long that it has to be folded, and folded again, to fit"},
    ),
    "narrow": ("accuracy", [made.tasks_record()], {"width": 2.0}),
    "all depths": ("accuracy", [made.tasks_record(depths=range(3, 31))], {}),
    "flat": ("perplexity", [made.perplexity_record(["a"], growth=0.005)], {}),
    "steep": ("perplexity", [made.perplexity_record(growth=2.0)], {}),
    "one row": ("heatmap", [made.execution_record(["routed"], depths=[22])], {}),
    "ranks of 80": ("ranks", [made.ranks_record(80, 5, FOUR)], {"title": "Ranks"}),
    "wide ranks": ("ranks", [made.ranks_record(30, 5, FOUR)], {"width": 6.8}),
    "context of 80": ("context", [made.context_record(80)], {}),
    "two contexts": ("context", [made.context_record(30, (256, 512))], {"title": "Two"}),
    "speed by setting": (
        "speed",
        [made.speed_record(("a", "b", "c"), ((1, 256), (8, 1024)))],
        {"title": "Speed"},
    ),
    "breakdown by setting": (
        "breakdown",
        [made.speed_record(("static:a/long/way/to/sleb.json", "routed"), ((1, 256), (8, 1024)))],
        {},
    ),
    "narrow breakdown": ("breakdown", [made.speed_record(("routed",))], {"width": 2.0}),
    "many orders": (
        "importance",
        [
            made.importance_record("taylor", protect="none"),
            made.importance_record("taylor"),
            made.importance_record("block-influence"),
            made.sleb_record(),
        ],
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_text_is_apart_and_on_the_page(case, monkeypatch):
    name, records, options = CASES[case]
    figure = draw(name, records, **options)
    texts = drawn_texts(figure, monkeypatch)
    assert len(texts) > 5
    assert overlapping(texts) == []
    assert clipped(texts, figure) == []
    assert figure.get_figwidth() == options.get("width", 3.3)
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


def test_the_check_sees_text_that_overlaps_or_is_cut_off(monkeypatch):
    figure = draw("accuracy", [made.tasks_record()])
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "other")
    figure.text(0.99, 0.5, "cut off")
    texts = drawn_texts(figure, monkeypatch)
    assert overlapping(texts) == [("one", "other")]
    assert clipped(texts, figure) == ["cut off"]


def test_no_type_is_smaller_than_a_paper_allows(monkeypatch):
    from matplotlib.text import Text

    for name in FIGURES:
        figure = draw(name, made.EXAMPLES[name])
        sizes = {t.get_fontsize() for t in figure.findobj(Text) if t.get_text()}
        assert min(sizes) >= 6
        assert max(sizes) <= 8


def test_neighbouring_lines_differ_in_colour_marker_and_dashes():
    looks = [look(index) for index in range(30)]
    for this, other in pairwise(looks):
        for what in ("color", "marker", "linestyle"):
            assert this[what] != other[what]
    assert len({(a["color"], a["marker"], str(a["linestyle"])) for a in looks}) == 30


@pytest.mark.parametrize("width", [0.0, 1.9, 20.1, float("nan")])
def test_a_width_that_no_page_has_is_refused(width):
    with pytest.raises(ResultError, match="a figure is 2 to 20 inches wide"):
        draw("accuracy", [made.tasks_record()], width=width)


def test_labels_are_shown_as_they_are():
    labels = ["_hidden", "$x_1$", "a_b", "back\\slash"]
    figure = draw("accuracy", [made.tasks_record(labels)])
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown[:4] == labels
    figure.canvas.draw()
