"""What a shell is told: commands, options, and the values of those that have words."""

import subprocess
import sys

import pytest

from buddy.budget.request import read_budget
from buddy.cli import named
from buddy.cli.commands.importance import _INDICATORS
from buddy.cli.main import main
from buddy.importance.indicators.indicator import INDICATORS
from buddy.policies.registry import POLICIES


def completed(monkeypatch, capsys, typed):
    """What bash is offered where a command line ends."""
    words = typed.split(" ")
    monkeypatch.setenv("_BUDDY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    monkeypatch.setattr(sys, "argv", ["buddy"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    return capsys.readouterr().out.split()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "models" / "smol-mine").mkdir(parents=True)
    (tmp_path / "hub" / "models--org--smol--x").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("buddy gen", {"generate"}),
        ("buddy eval p", {"ppl"}),
        ("buddy generate hi --bud", {"--budget"}),
        ("buddy generate hi --budget 0.", {"0.875", "0.75", "0.625", "0.5"}),
        ("buddy bench -b 1", {"1.0"}),
        ("buddy generate hi --policy s", {"static", "searched"}),
        ("buddy importance --indicator b", {"block-influence"}),
        ("buddy serve --quant ", {"int8", "int4"}),
    ],
)
def test_words_are_offered(monkeypatch, capsys, typed, offered):
    found = completed(monkeypatch, capsys, typed)
    assert set(found) == offered


@pytest.mark.parametrize(
    "typed", ["buddy info --model smol", "buddy chat smol", "buddy eval ppl -m smol"]
)
def test_models_are_the_presets_and_those_of_the_cache(monkeypatch, capsys, home, typed):
    found = completed(monkeypatch, capsys, typed)
    assert "smol-mine" in found
    assert {"smollm2-135m", "smollm2-135m-buddy"} <= set(found)
    assert "qwen3-0.6b" not in found
    assert completed(monkeypatch, capsys, "buddy info org") == ["org/smol--x"]


def test_what_is_offered_is_taken():
    assert set(named.POLICIES) == set(POLICIES)
    methods = set(named.policies()) - set(POLICIES)
    assert {"layerskip", "pudding"} <= methods
    assert set(_INDICATORS) == set(INDICATORS)
    for budget in named.BUDGETS:
        assert read_budget(budget)


def test_a_script_is_shown_and_nothing_heavy_is_imported_to_complete():
    code = """
import os, sys
os.environ |= {"_BUDDY_COMPLETE": "complete_bash", "COMP_CWORD": "4"}
os.environ["COMP_WORDS"] = "buddy generate hi --policy r"
from buddy.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "routed" in done.stdout.split()
