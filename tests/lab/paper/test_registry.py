"""The list of tables, and what is refused before anything is measured."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BuddyError, DataError, ModelError, PolicyError, ResultError
from buddy.lab.paper.methods import ComparedMethod, read_method
from buddy.lab.paper.registry import TABLES, find_table
from buddy.lab.plots.figures import FIGURES
from tests.lab.paper.made import make
from tests.tiny import tiny_model
from tests.words import word_tokenizer

NAMED = [
    *("accuracy", "gsm8k", "speed", "breakdown", "training-cost"),
    *("context", "prior", "omega", "start-layer"),
    *("observations", "paths", "heatmap", "reuse", "grpo", "budgets", "retention"),
]


def test_every_table_of_the_paper_is_there_and_can_be_made():
    assert list(TABLES) == NAMED
    for name, table in TABLES.items():
        module = importlib.import_module(f"buddy.lab.paper.tables.{table.module}")
        assert callable(module.collect)
        assert table.differs.endswith(".")
        for figure in table.figures:
            assert FIGURES[figure].reads(f"reproduce-{name}")


def test_the_list_says_what_each_shows_needs_and_takes():
    done = CliRunner().invoke(app, ["reproduce", "--list"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1 : len(TABLES) + 1]] == NAMED
    for line, table in zip(lines[1:], TABLES.values(), strict=False):
        assert table.shows in line
        assert table.needs in line
        assert line.rstrip().endswith(f"{table.minutes:g}")
        assert ("~" in line) is not table.measured
    assert CliRunner().invoke(app, ["reproduce"]).stdout == done.stdout


def test_the_list_imports_no_torch():
    code = """
import sys
sys.argv = ["buddy", "reproduce", "--list"]
from buddy.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "near"), [("acuracy", "accuracy"), ("path", "paths"), ("startlayer", "start-layer")]
)
def test_a_name_that_is_nearly_right_is_told(name, near):
    with pytest.raises(ResultError, match=f"no table '{name}': did you mean .*{near}"):
        find_table(name)


def test_a_name_that_is_like_none_gets_them_all():
    with pytest.raises(ResultError, match=r"expected one of accuracy, gsm8k, .*--list"):
        find_table("zzzzzz")


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("SLEB=static:3,2,1", ComparedMethod(label="SLEB", policy="static:3,2,1")),
        ("mine=runs/a=b/checkpoint", ComparedMethod(label="mine", model="runs/a=b/checkpoint")),
        ("R=random:7@org/name", ComparedMethod(label="R", policy="random:7", model="org/name")),
    ],
)
def test_methods_are_read(text, method):
    assert read_method(text) == method


@pytest.mark.parametrize("text", ["static:3", "=full", "a=", "a= ", "x=nonsense@model"])
def test_what_is_no_method_is_refused(text):
    with pytest.raises(PolicyError):
        read_method(text)


@pytest.fixture
def plain(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    word_tokenizer().save_pretrained(tmp_path / "plain")
    return str(tmp_path / "plain")


METHODS = (ComparedMethod(label="a", policy="full"),)
REFUSED = [
    ("paths", {"data_dir": "nowhere"}, DataError, "needs alpaca/train.jsonl, samsum/validation"),
    ("observations", {"data_dir": None}, DataError, "name it by --data-dir"),
    ("breakdown", {"methods": METHODS}, ResultError, "takes no --method: only accuracy"),
    ("breakdown", {"rows": 3}, ResultError, "table breakdown draws no rows"),
    ("heatmap", {"plain": True}, ModelError, "no trained router"),
    ("budgets", {"plain": True}, ModelError, "no trained router"),
]


@pytest.mark.parametrize(("table", "wrong", "error", "says"), REFUSED)
def test_what_cannot_be_made_is_refused_first(
    model, plain, data, tmp_path, table, wrong, error, says
):
    out = tmp_path / "out"
    where = wrong.get("data_dir", data)
    folder = tmp_path / where if isinstance(where, str) else where
    name = plain if wrong.get("plain") else model
    with pytest.raises(error, match=says):
        make(table, name, folder, out, methods=wrong.get("methods", ()), rows=wrong.get("rows"))
    assert not out.exists()


def test_two_methods_of_one_label_are_refused(model, data, tmp_path):
    own = (ComparedMethod(label="Buddy", policy="random"),)
    with pytest.raises(BuddyError, match="two methods are called 'Buddy'"):
        make("speed", model, data, tmp_path / "out", methods=own)
    own = (ComparedMethod(label="Mine", policy="routed"),)
    with pytest.raises(BuddyError, match="'Buddy' and 'Mine' are one policy of one model, routed"):
        make("speed", model, data, tmp_path / "out", methods=own)
