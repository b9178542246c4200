"""`buddy plot`: a file and its path, or one line that says what is wrong."""

import json
import os
import subprocess
import sys

import pytest

from tests.lab.plots import made


def plot(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "buddy", "plot", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        check=False,
    )


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(made.tasks_record()))
    return path


def test_stdout_is_the_path_of_the_figure_that_the_options_describe(record, tmp_path):
    more = tmp_path / "more.json"
    more.write_text(json.dumps(made.tasks_record(["mine"])))
    out = tmp_path / "figure.svg"
    done = plot("accuracy", record, more, "--out", out, "--title", "A title", "--width", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    assert done.stderr == ""
    text = out.read_text()
    assert 'width="360pt"' in text
    # Letters are shapes, but each text is named in a comment.
    assert all(f"<!-- {words} -->" in text for words in ("A title", "mine", "routed"))


def test_help_needs_neither_torch_nor_matplotlib():
    code = """
import sys
sys.argv = ["buddy", "plot", "--help"]
import buddy.cli.main
try:
    buddy.cli.main.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "transformers", "numpy", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "heatmap" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["pie", "RECORD", "--out", "OUT.png"], "no figure 'pie'"),
        (["speed", "RECORD", "--out", "OUT.png"], "draw it with buddy plot accuracy"),
        (["accuracy", "RECORD", "--out", "OUT.jpg"], "written as .png, .pdf, .svg"),
        (["accuracy", "RECORD", "--out", "/nowhere/a.png"], "there is no folder /nowhere"),
        (["accuracy", "RECORD", "--out", "OUT.png", "--task", "x"], "no task 'x'"),
        (["accuracy", "RECORD", "--out", "OUT.png", "--width", "1"], "2 to 20 inches wide"),
        (["speed", "RECORD", "--out", "OUT.png", "--task", "x"], "no task to choose"),
        (["accuracy", "nothing.json", "--out", "OUT.png"], "nothing.json cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says, record, tmp_path):
    places = {"RECORD": str(record)}
    given = [places.get(a, a.replace("OUT", str(tmp_path / "out"))) for a in arguments]
    done = plot(*given)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == [record]
