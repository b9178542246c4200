"""`buddy bench`: a record for plots, tables for a person, and refusals before any work."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BudgetError, PolicyError, PromptError, ResultError
from buddy.lab.evaluation.speed import speed as library
from buddy.lab.plots.read.speed_cells import read_cells
from buddy.model import BuddyForCausalLM
from tests.product.cli import forked
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a word tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 97)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    return str(path)


def invoke(folder, out, *arguments):
    short = ["--context", "8", "--new-tokens", "3", "--rounds", "1"]
    command = ["bench", "--model", folder, "--out", str(out), *short, *arguments]
    return CliRunner().invoke(app, command)


def test_the_record_is_what_plots_read_and_stdout_is_its_path(folder, tmp_path):
    out = tmp_path / "speed.json"
    budgets = ["--budget", "1.0", "--budget", "4 blocks"]
    done = invoke(folder, out, *budgets, "--policy", "random", "--policy", "mine=static:3,2,1,4")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    record = json.loads(out.read_text())
    assert record["kind"] == "eval-speed"
    assert record["config"]["prompts"] == "random token ids"
    assert record["config"]["budgets"] == ["1.0", "4 blocks"]
    cells = read_cells([record], "speed")
    assert {(cell.policy, cell.blocks) for cell in cells} >= {
        ("full", 6),
        ("random", 4),
        ("static:3,2,1,4", 4),
    }
    for word in ("transformers", "mine", "4/6", "Where the time goes", "peak memory"):
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == [out]
    assert record["config"]["prior"] is None, "none was needed"


def test_a_prior_that_is_needed_is_measured_before_the_clock_runs_and_named(folder, tmp_path):
    out = tmp_path / "speed.json"
    done = invoke(folder, out, "--budget", "4 blocks", "--no-transformers")
    assert done.exit_code == 0, done.stderr
    config = json.loads(out.read_text())["config"]
    assert config["policies"] == ["static"]
    assert "quick cosine pass" in config["prior"]["source"]
    assert len(config["prior"]["sha256"]) == 64


def test_it_is_a_command_that_warns_of_nothing(folder, tmp_path):
    out = tmp_path / "speed.json"
    arguments = ["-m", folder, "--out", str(out), "--no-transformers", "-b", "0.5"]
    arguments += ["--policy", "random", "--context", "8", "--new-tokens", "3", "--rounds", "1"]
    done = forked.run(["bench", *arguments], is_strict=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{out}\n"
    said = [line for line in done.stderr.splitlines() if not line.startswith("compiled the native")]
    assert said[0].startswith("Speed, batch 1, context 8"), done.stderr
    record = json.loads(out.read_text())
    assert record["command"].startswith("buddy bench -m")
    assert {cell["speedup_transformers"] for cell in record["results"]["cells"]} == {None}
    assert {cell["blocks"] for cell in record["results"]["cells"]} == {3, 6}


def test_prompts_come_from_a_text(folder, tmp_path):
    out, text = tmp_path / "speed.json", tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 90}" for i in range(45)))
    arguments = ["--policy", "random", "--batch", "2", "--text", str(text), "--rounds", "3"]
    done = invoke(folder, out, *arguments)
    assert done.exit_code == 0, done.stderr
    config = json.loads(out.read_text())["config"]
    # 45 tokens fill five prompts of 8, that is two whole batches of two for three rounds.
    assert (config["prompts"], config["distinct_prompts"]) == (str(text), 4)
    short = invoke(folder, out, *arguments[:2], "--batch", "6", "--text", str(text))
    assert isinstance(short.exception, ResultError)
    assert "fills 5 prompts" in str(short.exception)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--policy", "random", "-b", "0.2"], BudgetError, "expected 3 to 6 blocks"),
        (["--policy", "random", "-b", "auto"], BudgetError, "Budget Predictor"),
        (["--policy", "static:1", "-b", "0.5"], BudgetError, "cannot be spent"),
        (["--policy", "nonsense"], PolicyError, "no policy 'nonsense'"),
        (["--policy", "full"], BudgetError, "cannot be spent"),
        (["--policy", "random", "--reroute", "0"], PolicyError, "reroute must be"),
        (["--policy", "random", "--context", "63"], PromptError, "context holds 64"),
        (["--policy", "random", "--text", "wikitext2"], ResultError, "needs --data-dir"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    folder, tmp_path, monkeypatch, arguments, error, says
):
    def run(*_):
        raise AssertionError("it ran")

    monkeypatch.setattr(BuddyForCausalLM, "forward", run)
    done = invoke(folder, tmp_path / "speed.json", *arguments)
    assert isinstance(done.exception, error), done.exception
    assert says in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "says"), [("nowhere/speed.json", "there is no folder"), (".", "no regular file")]
)
def test_a_record_that_could_not_be_written_is_refused_before_loading(tmp_path, where, says):
    done = invoke("no-such-model", tmp_path / where)
    assert isinstance(done.exception, ResultError)
    assert says in str(done.exception)


def test_an_interrupted_run_says_so_and_writes_nothing(folder, tmp_path, monkeypatch):
    out = tmp_path / "speed.json"
    out.write_text("the record before")
    time_once, calls = library.time_once, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 4:  # in the round after the warm-up
            raise KeyboardInterrupt
        return time_once(*arguments)

    monkeypatch.setattr(library, "time_once", interrupted)
    done = invoke(folder, out, "--policy", "random", "--budget", "0.5")
    assert done.exit_code == 130
    assert "interrupted" in done.stderr
    assert "no record was written" in done.stderr
    assert done.stdout == ""
    assert out.read_text() == "the record before"
    assert list(tmp_path.iterdir()) == [out]


def test_threads_are_as_asked_for(folder, tmp_path):
    out = tmp_path / "speed.json"
    arguments = ["-m", folder, "--out", str(out), "--threads", "2", "-b", "1.0"]
    arguments += ["--no-transformers", "--context", "4", "--new-tokens", "2", "--rounds", "1"]
    done = forked.run(["bench", *arguments])
    assert json.loads(out.read_text())["config"]["threads"] == 2, done.stderr


@pytest.mark.parametrize("command", [["bench"], ["eval", "rouge"]])
def test_help_does_not_import_torch(command):
    code = f"""
import sys
sys.argv = ["buddy", *{command}, "--help"]
import buddy.cli.main
try:
    buddy.cli.main.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "transformers", "numpy", "datasets"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
