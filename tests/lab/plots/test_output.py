"""Files: the same bytes every time, whole or not at all; and who may draw what."""

import json
import os
import struct
import subprocess
import sys

import matplotlib
import pytest

from buddy.errors import ResultError
from buddy.lab.plots.figures import FIGURES, draw
from buddy.lab.plots.output import check_out, save_figure
from tests.lab.plots import made


def test_a_record_gives_the_same_bytes_each_time(tmp_path):
    for name, suffix in (("accuracy", "png"), ("accuracy", "svg"), ("heatmap", "pdf")):
        paths = [tmp_path / f"{name}{i}.{suffix}" for i in range(2)]
        for path in paths:
            save_figure(draw(name, made.EXAMPLES[name]), path)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_users_own_settings_change_nothing_and_stay(tmp_path):
    first, other = tmp_path / "a.png", tmp_path / "b.png"
    save_figure(draw("speed", made.EXAMPLES["speed"]), first)
    theirs = {"font.size": 20, "ytick.labelsize": 30, "savefig.dpi": 50, "axes.grid": True}
    with matplotlib.rc_context(theirs):
        save_figure(draw("speed", made.EXAMPLES["speed"]), other)
        assert all(matplotlib.rcParams[name] == value for name, value in theirs.items())
    assert first.read_bytes() == other.read_bytes()


def test_a_png_is_a_column_wide_at_300_dots_an_inch(tmp_path):
    path = tmp_path / "a.PNG"
    save_figure(draw("accuracy", made.EXAMPLES["accuracy"]), path)
    (width,) = struct.unpack(">I", path.read_bytes()[16:20])
    assert width == 990


def test_pdf_and_svg_are_vectors(tmp_path):
    for suffix, start in (("pdf", b"%PDF"), ("svg", b"<?xml")):
        path = tmp_path / f"a.{suffix}"
        save_figure(draw("heatmap", made.EXAMPLES["heatmap"]), path)
        data = path.read_bytes()
        assert data.startswith(start)
        assert b"<image" not in data
        assert b"/Subtype /Image" not in data


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.png.txt", ".png"])
def test_an_unknown_suffix_is_refused(name, tmp_path):
    with pytest.raises(ResultError, match=r"a figure is written as \.png, \.pdf, \.svg, got"):
        check_out(tmp_path / name)


def test_where_nothing_can_be_written_is_said_beforehand(tmp_path):
    with pytest.raises(ResultError, match="there is no folder"):
        check_out(tmp_path / "none" / "a.png")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ResultError, match="no regular file"):
        check_out(tmp_path / "b.png")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text("before")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResultError, match="cannot be written: No space left on device"):
        save_figure(draw("accuracy", made.EXAMPLES["accuracy"]), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_figure_or_option_is_refused():
    with pytest.raises(ResultError, match="no figure 'pie': expected one of accuracy, perplexity"):
        draw("pie", made.EXAMPLES["accuracy"])
    with pytest.raises(ResultError, match="the speed figure has no task to choose: it has no opt"):
        draw("speed", made.EXAMPLES["speed"], task="piqa")
    with pytest.raises(ResultError, match=r"heatmap figure has no metric .* its options are task"):
        draw("heatmap", made.EXAMPLES["heatmap"], metric="acc")


@pytest.mark.parametrize("name", FIGURES)
def test_what_a_figure_cannot_read_is_refused(name):
    with pytest.raises(ResultError, match=f"the {name} figure needs at least one record, got none"):
        draw(name, [])
    foreign = made.record("routed-speed", {})
    good = made.EXAMPLES[name][0]
    with pytest.raises(
        ResultError, match=f"record 2 of 2 is of kind 'routed-speed', but the {name} figure reads"
    ):
        draw(name, [good, foreign])
    with pytest.raises(ResultError, match=r"results lacks \w+.*make the record again"):
        draw(name, [made.record(good["kind"], {})])
    with pytest.raises(ResultError, match="results: expected a table, got null"):
        draw(name, [{"kind": good["kind"]}])


def test_a_record_for_another_figure_names_that_figure():
    with pytest.raises(ResultError, match="draw it with buddy plot speed or breakdown"):
        draw("accuracy", made.EXAMPLES["speed"])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("points", [], "points must be at least 1 long"),
        ("points", {}, "points: expected a list, got {}"),
        ("points", [3], r"points\[0\]: expected a table, got 3"),
    ],
)
def test_broken_points_are_named(field, value, says):
    with pytest.raises(ResultError, match=says):
        draw("accuracy", [made.record("eval-tasks", {field: value})])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("value", "0.4", "value: expected float, got '0.4'"),
        ("value", float("nan"), r"value must be at least .* and at most .*, got nan"),
        ("value", True, "value: expected float, got True"),
        ("blocks", 2.5, "blocks: expected int, got 2.5"),
        ("label", "", "label must be at least 1 long, got ''"),
        ("stderr", -0.1, "stderr must be at least 0 .* got -0.1"),
        ("num_blocks", 12, "blocks must be at most 12, got 20"),
    ],
)
def test_a_broken_field_is_named(field, value, says):
    points = [made.point("a", 10, 0.3), made.point("a", 20, 0.4) | {field: value}]
    where = r"record 1 of 1 \(eval-tasks\): results: points\[1\].*"
    with pytest.raises(ResultError, match=where + says):
        draw("accuracy", [made.record("eval-tasks", {"points": points})])


def test_models_of_different_depths_are_not_mixed():
    other = made.point("b", 20, 0.4) | {"num_blocks": 32}
    with pytest.raises(ResultError, match="models with 30 and 32 blocks: draw a figure for each"):
        draw("accuracy", [made.record("eval-tasks", {"points": [made.point("a", 20, 0.4), other]})])


def in_a_new_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_drawing_runs_no_model_and_touches_no_global_figure():
    code = f"""
import json, sys
from buddy.lab.plots.figures import draw
draw("accuracy", [json.loads({json.dumps(json.dumps(made.tasks_record()))})])
print(sorted({{"torch", "transformers", "matplotlib.pyplot"}} & set(sys.modules)))
"""
    done = in_a_new_process(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_without_matplotlib_the_error_says_what_to_install():
    code = """
import sys
sys.modules["matplotlib"] = None
from buddy.errors import ResultError
from buddy.lab.plots.figures import draw
try:
    draw("accuracy", [])
except ResultError as error:
    print(error)
"""
    done = in_a_new_process(code)
    assert 'pip install "buddy-llm[plots]"' in done.stdout, done.stderr
