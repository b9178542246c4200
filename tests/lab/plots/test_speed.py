"""Speed and breakdown: the records' ratios and shares."""

import pytest

from buddy.errors import ResultError
from buddy.lab.plots.draw import breakdown, speed
from tests.lab.plots.made import DEPTHS, L, cell, record, speed_record


def ideal(axes):
    """The one line without markers that is no level."""
    (line,) = [
        line
        for line in axes.lines
        if line.get_marker() == "None" and list(line.get_xdata()) != [0, 1]
    ]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_lines_are_the_speedups_and_full_depth_ends_each():
    given = speed_record()
    figure = speed.draw([given])
    for axes, phase in zip(figure.axes, ("prefill", "decode"), strict=True):
        assert axes.get_title() == phase.capitalize()
        for bars, policy in zip(axes.containers, ("static:sleb.json", "routed"), strict=True):
            mine = [
                cell
                for cell in given["results"]["cells"]
                if cell["phase"] == phase and cell["policy"] in (policy, "full")
            ]
            mine.sort(key=lambda item: item["blocks"])
            line = bars.lines[0]
            assert list(line.get_xdata()) == [item["blocks"] for item in mine] == list(DEPTHS)
            assert list(line.get_ydata()) == [item["speedup_own_dense"] for item in mine]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["static sleb", "routed", "ideal", "transformers"]


def test_the_ideal_and_transformers_are_levels_of_the_record():
    given = speed_record()
    for axes, phase in zip(speed.draw([given]).axes, ("prefill", "decode"), strict=True):
        here = [cell for cell in given["results"]["cells"] if cell["phase"] == phase]
        assert ideal(axes) == {item["blocks"]: item["ideal_speedup"] for item in here}
        levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
        assert levels == [0.8]


def test_bars_span_the_slowest_and_the_fastest_round():
    slow = cell("a", "decode", 20) | {
        "latency_ms": 10.0,
        "latency_ms_min": 8.0,
        "latency_ms_max": 20.0,
        "speedup_own_dense": 1.6,
    }
    figure = speed.draw([record("eval-speed", {"cells": [slow]})])
    ((low, high),) = figure.axes[0].containers[0].lines[2][0].get_segments()
    assert (low[1], high[1]) == pytest.approx((1.6 * 10 / 20, 1.6 * 10 / 8))


def test_each_batch_and_context_has_a_row():
    figure = speed.draw([speed_record(("routed",), ((1, 256), (8, 1024)))])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "Prefill\nbatch 1, 256 tokens",
        "Decode\nbatch 1, 256 tokens",
        "Prefill\nbatch 8, 1024 tokens",
        "Decode\nbatch 8, 1024 tokens",
    ]


def test_what_was_not_measured_says_so():
    cells = [cell("a", "prefill", 20), cell("a", "decode", 20), cell("a", "decode", 20, batch=4)]
    for module in (speed, breakdown):
        figure = module.draw([record("eval-speed", {"cells": cells})])
        texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
        assert texts == [[], [], ["not measured"], []]


def test_records_with_dense_runs_of_their_own_merge():
    first, other = speed_record(("routed",)), speed_record(("static:sleb.json",))
    for slower in other["results"]["cells"]:
        slower["latency_ms_max"] *= 1.5
    figure = speed.draw([first, other])
    assert [len(bars.lines[0].get_xdata()) for bars in figure.axes[0].containers] == [5, 5]
    repeated = cell("routed", "decode", DEPTHS[0]) | {"speedup_own_dense": 9.0}
    with pytest.raises(ResultError, match="'routed' has two decode speeds at 15 blocks, batch 1"):
        speed.draw([first, record("eval-speed", {"cells": [repeated]})])


def test_a_prompt_at_a_depth_of_its_own_makes_a_line_of_its_own():
    given = speed_record(("routed",))
    apart = {"prefill_blocks": 15, "speedup_own_dense": 1.2}
    deep = [cell("routed", "decode", 22) | apart, cell("routed", "decode", L) | apart]
    given["results"]["cells"] += [cell("routed", "prefill", 15) | apart, *deep]
    for module in (speed, breakdown):
        module.draw([given])
    _, decode = speed.draw([given]).axes
    drawn = [list(bars.lines[0].get_xdata()) for bars in decode.containers]
    assert drawn == [list(DEPTHS), [22, L]]
    labels = [text.get_text() for text in speed.draw([given]).legends[0].get_texts()]
    assert labels == ["routed", "routed, prompt at 15", "ideal", "transformers"]


def test_stacks_are_the_shares_in_percent():
    given = speed_record(("routed",))
    figure = breakdown.draw([given])
    for axes, phase in zip(figure.axes, ("prefill", "decode"), strict=True):
        here = sorted(
            (c for c in given["results"]["cells"] if c["phase"] == phase and c["shares"]),
            key=lambda item: item["blocks"],
        )
        for part, bars in zip(here[0]["shares"], axes.containers, strict=True):
            heights = [bar.get_height() for bar in bars]
            assert heights == pytest.approx([100 * item["shares"][part] for item in here])
        tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
        assert tops == pytest.approx([100] * len(here))
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(d) for d in DEPTHS]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shares": {"blocks": 1.0}}, "shares lacks router, gather_scatter"),
        ({"phase": "warm-up"}, "phase: expected one of prefill, decode"),
        ({"latency_ms": 0}, "latency_ms must be above 0"),
        ({"latency_ms_min": 1e9}, "latency_ms_min must be at most"),
        ({"blocks": L + 1}, f"blocks must be at most {L}"),
        ({"policy": None}, "policy must be a text, got null"),
    ],
)
def test_a_broken_cell_is_named(change, says):
    broken = cell("a", "decode", 20) | change
    with pytest.raises(ResultError, match=rf"record 1 of 1 \(eval-speed\).*cells\[0\].*{says}"):
        breakdown.draw([record("eval-speed", {"cells": [broken]})])


def test_shares_must_be_whole_and_there():
    ours = cell("a", "decode", 20)
    shares = ours["shares"] | {"blocks": 0.2}
    with pytest.raises(ResultError, match="shares that sum to 1, not"):
        breakdown.draw([record("eval-speed", {"cells": [ours | {"shares": shares}]})])
    theirs = cell(None, "decode", L, label="transformers") | {"shares": None}
    with pytest.raises(ResultError, match="draws our cells, but all are of transformers"):
        speed.draw([record("eval-speed", {"cells": [theirs]})])
    with pytest.raises(ResultError, match="needs cells with shares"):
        breakdown.draw([record("eval-speed", {"cells": [ours | {"shares": None}]})])
