"""`buddy eval rouge`: a record with both ways side by side, and a run that can be interrupted."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BudgetError, DataError, PromptError, ResultError
from buddy.files import alone
from buddy.lab.cli.commands.eval_rouge import _show
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.rouge.rouge_points import METRICS, to_results
from buddy.lab.plots.read.points import read_execution, read_points, series_of
from buddy.model import BuddyForCausalLM
from tests.lab.evaluation.test_phases import POLICY, with_ledger
from tests.lab.evaluation.test_rouge import made
from tests.tiny import tiny_model
from tests.words import say, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, a tokenizer and SAMSum's dialogues."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "samsum").mkdir()
    rows = [
        {"id": str(i), "dialogue": say(*range(3 + i, 9 + 2 * i)), "summary": say(3 + i, 9)}
        for i in range(6)
    ]
    lines = "\n".join(json.dumps(row) for row in rows)
    (path / "samsum" / "validation.jsonl").write_text(lines)
    return path


def invoke(folder, out, *arguments):
    short = ["--max-new-tokens", "4", "--batch", "2", "--data-dir", str(folder)]
    command = ["eval", "rouge", "--model", str(folder), "--out", str(out), *short, *arguments]
    return CliRunner().invoke(app, command)


def test_of_two_runs_for_one_record_the_second_is_refused(folder, tmp_path):
    out = tmp_path / "rouge.json"
    with alone(out):
        done = invoke(folder, out, "--limit", "1")
    assert f"another run is writing to {out}" in str(done.exception)
    assert not list(tmp_path.iterdir())


ROUTED = ["--policy", "random", "-b", "1.0", "-b", "0.5"]


def test_the_record_has_both_ways_and_stdout_is_its_path(folder, tmp_path):
    out = tmp_path / "rouge.json"
    done = invoke(folder, out, *ROUTED, "--limit", "5", "--seed", "7")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    record = json.loads(out.read_text())
    assert record["kind"] == "eval-rouge"
    config = record["config"]
    assert (config["prompt"], config["decoding"], config["seed"]) == ("plain", "greedy", 7)
    assert "Summarize" in config["instruction"]
    points = [point for point in read_points([record], "accuracy") if point.metric == "rougeL"]
    assert len(series_of(points)) == 3  # full depth, and both ways
    execution = read_execution([record], "heatmap")
    assert [entry.label for entry in execution] == ["full", "random, recompute", "random, reuse"]
    assert len(record["results"]["differences"]) == 3
    assert {point["samples"] for point in record["results"]["points"]} == {5}
    for word in ("recompute", "reuse", "difference", "ROUGE-L"):
        assert word in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"rouge.json", "rouge.samples.jsonl"}


def test_ways_that_spent_a_mean_unlike_are_compared_too():
    """The depths that both ways ran can round to others than the budget's own."""
    (condition,) = plan_conditions(with_ledger(), POLICY, ("mean:0.75",), means=True)
    answers = {"step": [made(0.5, p0125=1)], "prefill": [made(0.4, p015=1)]}
    text = io.StringIO()
    _show(Console(file=text, width=80), to_results(condition, answers))
    (row,) = [line for line in text.getvalue().splitlines() if "difference" in line]
    assert row.split() == ["difference"] + ["+10.00"] * len(METRICS)


def test_interrupted_it_goes_on(folder, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.json", tmp_path / "rouge.json"
    assert invoke(folder, whole, *ROUTED).exit_code == 0
    generate, calls = BuddyForCausalLM.generate, []

    def interrupted(self, *arguments, **options):
        calls.append(options)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(self, *arguments, **options)

    monkeypatch.setattr(BuddyForCausalLM, "generate", interrupted)
    stopped = invoke(folder, out, *ROUTED)
    assert stopped.exit_code == 130
    assert "4 samples are kept" in stopped.stderr
    assert stopped.stdout == ""
    assert not out.exists()
    done = invoke(folder, out, *ROUTED)
    assert done.exit_code == 0, done.stderr
    assert "going on from 4 samples" in done.stderr
    assert len(calls) == 3 + 7  # of nine batches two were there
    results = [json.loads(path.read_text())["results"] for path in (whole, out)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--policy", "random", "-b", "0.2"], BudgetError, "expected 3 to 6 blocks"),
        (["--split", "test"], DataError, "test.jsonl cannot be read"),
        (["--max-new-tokens", "60"], PromptError, "ask for fewer new tokens"),
        (["--out", "nowhere/rouge.json"], ResultError, "there is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    folder, tmp_path, monkeypatch, arguments, error, says
):
    def run(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(BuddyForCausalLM, "forward", run)
    done = invoke(folder, tmp_path / "rouge.json", *arguments)
    assert isinstance(done.exception, error), done.exception
    assert says in str(done.exception)
    assert not (tmp_path / "rouge.json").exists()
