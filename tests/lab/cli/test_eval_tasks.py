"""`buddy eval tasks` and `ppl`: records, resuming, and what is refused; with a tiny model."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BudgetError, DataError, PolicyError, ResultError
from tests.lab.evaluation.task_rows import ROWS
from tests.product.cli import forked
from tests.tiny import random_ids, tiny_model
from tests.words import say, word_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, and PIQA and a text in its words."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "piqa").mkdir()
    (path / "boolq").mkdir()
    (path / "gsm8k").mkdir()
    (path / "gsm8k" / "test.jsonl").write_text(json.dumps(ROWS["gsm8k"]))
    (path / "gsm8k" / "train.jsonl").write_text(json.dumps(ROWS["gsm8k"]))
    rows = [
        {"goal": say(3 + n, 4), "sol1": say(5 + n), "sol2": say(6 + n, 7), "label": n % 2}
        for n in range(6)
    ]
    (path / "piqa" / "validation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "boolq" / "validation.jsonl").write_text("")
    (path / "words.txt").write_text(say(*random_ids(1, 300)[0].tolist()))
    return path


def tasks(folder, out, *arguments):
    return [
        *["eval", "tasks", "--model", str(folder), "--out", str(out)],
        *["--data-dir", str(folder), "--task", "piqa", "--policy", "random", *arguments],
    ]


BUDGETS = ["-b", "1.0", "-b", "4 blocks"]


def test_a_record_a_table_and_its_path_on_stdout(folder, tmp_path):
    out = tmp_path / "tasks.json"
    done = CliRunner().invoke(app, tasks(folder, out, *BUDGETS))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    record = json.loads(out.read_text())
    assert record["kind"] == "eval-tasks"
    points = record["results"]["points"]
    assert {(p["label"], p["blocks"]) for p in points} == {("full", 6), ("random", 4)}
    assert {p["samples"] for p in points} == {6}
    value = {(p["label"], p["metric"]): p["value"] for p in points}
    for kept in record["results"]["kept"]:
        assert (kept["label"], kept["full_depth"]) == ("random", value["full", kept["metric"]])
        assert kept["value"] == value["random", kept["metric"]] / kept["full_depth"]
    assert len(record["results"]["kept"]) == 2
    for word in ("full", "random", "piqa", "acc_norm", "±", "kept of full depth"):
        assert word in done.stderr


def test_more_rows_go_on_from_those_there_are(folder, tmp_path):
    out = tmp_path / "tasks.json"
    CliRunner().invoke(app, tasks(folder, out, *BUDGETS, "--limit", "2"), catch_exceptions=False)
    more = CliRunner().invoke(app, tasks(folder, out, *BUDGETS))
    assert "going on from 8 samples" in more.stderr  # 2 rows, 2 conditions, answer and score
    fresh = tmp_path / "fresh.json"
    CliRunner().invoke(app, tasks(folder, fresh, *BUDGETS), catch_exceptions=False)
    results = [json.loads(path.read_text())["results"] for path in (out, fresh)]
    assert results[0] == results[1]


def test_differences_from_an_earlier_run_are_taken_row_by_row(folder, tmp_path):
    first, two = tmp_path / "one.json", tmp_path / "two.json"
    samples = str(first.with_suffix(".samples.jsonl"))
    budget = ["-b", "4 blocks"]
    CliRunner().invoke(app, tasks(folder, first, *budget), catch_exceptions=False)
    other = [*tasks(folder, two, *budget, "--against", samples), "--policy", "static:1,2"]
    done = CliRunner().invoke(app, other, catch_exceptions=False)
    results = [json.loads(path.read_text())["results"] for path in (first, two)]
    value = {(p["label"], p["metric"]): p["value"] for found in results for p in found["points"]}
    for point in results[1]["against"]:
        assert (point["minus"], point["samples"]) == ("random", 6)
        own = value[point["label"], point["metric"]]
        assert point["value"] == pytest.approx(own - value["random", point["metric"]])
    assert {p["label"] for p in results[1]["against"]} == {"random", "static:1,2"}
    assert {p["value"] for p in results[1]["against"] if p["label"] == "random"} == {0.0}
    assert "row by row" in done.stderr
    few = tasks(folder, tmp_path / "few.json", *budget, "--limit", "2")
    CliRunner().invoke(app, few, catch_exceptions=False)
    fewer = str(tmp_path / "few.samples.jsonl")
    refused = CliRunner().invoke(app, tasks(folder, two, *budget, "--against", fewer))
    assert isinstance(refused.exception, ResultError)
    assert "lacks 4 of the 6 rows" in str(refused.exception)


@pytest.mark.parametrize("stops", ["samples", "record"])
def test_a_full_disk_keeps_what_there_is_and_the_same_command_ends_the_run(folder, tmp_path, stops):
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    options = ["--limit", "1", "-b", "4 blocks"]
    CliRunner().invoke(app, tasks(folder, whole, *options), catch_exceptions=False)
    log_size = whole.with_suffix(".samples.jsonl").stat().st_size
    assert log_size + 200 < whole.stat().st_size
    most = log_size - 20 if stops == "samples" else log_size + 100
    command = tasks(folder, out, *options)
    full = forked.run(command, most_bytes=most)
    assert full.returncode == 2, full.stderr
    assert "kept" in full.stderr
    assert "Traceback" not in full.stderr
    assert not out.exists()
    again = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "going on from" in again.stderr
    results = [json.loads(path.read_text())["results"] for path in (out, whole)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--task", "piqqa"], DataError, "no local data for task 'piqqa'"),
        (["--task", "boolq"], DataError, "is empty"),
        (["-b", "2 blocks"], BudgetError, "budget of 2 blocks"),
        (["--policy", "full", "-b", "0.7"], BudgetError, ""),
        (["--policy", "nobody", "-b", "0.7"], PolicyError, "no policy 'nobody'"),
        (["--route-on", "answer"], PolicyError, "route-on must be prompt or full"),
        (["--task", "gsm8k", "--fewshot", "0"], DataError, "no room for a prompt in the model's"),
        (["--out", "/nowhere/t.json"], ResultError, "there is no folder"),
    ],
)
def test_refused_before_anything_is_measured(folder, tmp_path, arguments, error, message):
    out = tmp_path / "tasks.json"
    done = CliRunner().invoke(app, tasks(folder, out, *arguments))
    assert isinstance(done.exception, error), done.exception
    assert message in str(done.exception)
    assert not out.exists()


def test_the_average_of_tasks_knows_no_error_where_one_row_has_none(folder, tmp_path):
    out, single, other = tmp_path / "tasks.json", tmp_path / "one", tmp_path / "other"
    for place, rows in ((single, 1), (other, 4)):
        for task, row in (("piqa", ROWS["piqa"]), ("boolq", ROWS["boolq"])):
            (place / task).mkdir(parents=True)
            text = "\n".join([json.dumps(row)] * (rows if task == "piqa" else 4))
            (place / task / "validation.jsonl").write_text(text)
    for place, is_known in ((single, False), (other, True)):
        command = ["eval", "tasks", "-m", str(folder), "--data-dir", str(place), "--out", str(out)]
        done = CliRunner().invoke(app, [*command, "--task", "piqa", "--task", "boolq"])
        assert done.exit_code == 0, done.stderr
        points = json.loads(out.read_text())["results"]["points"]
        (average,) = [point for point in points if point["task"] == "average"]
        assert (average["stderr"] is not None) == is_known
        out.with_suffix(".samples.jsonl").unlink()


def test_the_blocks_of_prompts_are_filed_under_the_depth_of_prompts(folder, tmp_path):
    out = tmp_path / "tasks.json"
    phases = ["-b", "prefill:1.0,decode:4 blocks", "-b", "4 blocks", "--limit", "2"]
    CliRunner().invoke(app, tasks(folder, out, *phases), catch_exceptions=False)
    entries = json.loads(out.read_text())["results"]["execution"]
    assert {(entry["blocks"], round(sum(entry["rates"]))) for entry in entries} == {(6, 6), (4, 4)}


def test_settings_of_another_run_do_not_mix(folder, tmp_path):
    out = tmp_path / "tasks.json"
    CliRunner().invoke(app, tasks(folder, out, "--limit", "1"), catch_exceptions=False)
    done = CliRunner().invoke(app, tasks(folder, out, "--limit", "1", "--seed", "5"))
    assert isinstance(done.exception, ResultError)
    assert "another run" in str(done.exception)


def test_perplexity_of_a_text_file(folder, tmp_path):
    out = tmp_path / "ppl.json"
    done = CliRunner().invoke(
        app,
        [
            *["eval", "ppl", "--model", str(folder), "--out", str(out)],
            *["--text", str(folder / "words.txt"), "--window", "16", "--stride", "8"],
            *["--policy", "random", *BUDGETS],
        ],
    )
    assert done.exit_code == 0, done.stderr
    points = json.loads(out.read_text())["results"]["points"]
    assert {(p["task"], p["blocks"], p["metric"]) for p in points} == {
        ("words.txt", blocks, metric) for blocks in (4, 6) for metric in ("perplexity", "nll")
    }
    assert "words.txt" in done.stderr


@torch.no_grad()
def test_perplexity_begins_each_window_as_the_tokenizer_begins_a_text(tmp_path):
    begun, ids, out = tmp_path / "begun", random_ids(1, 15)[0].tolist(), tmp_path / "ppl.json"
    model, tokenizer = tiny_model("llama").eval(), word_tokenizer()
    model.save_pretrained(begun)
    rule = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = rule
    tokenizer.save_pretrained(begun)
    (tmp_path / "words.txt").write_text(say(*ids))
    command = ["eval", "ppl", "-m", str(begun), "--text", str(tmp_path / "words.txt")]
    command += ["--window", "16", "--stride", "8", "--out", str(out)]
    CliRunner().invoke(app, command, catch_exceptions=False)
    logits = model(torch.tensor([[1, *ids]])).logits[0, 7:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-8:]))
    [found] = [
        p["value"] for p in json.loads(out.read_text())["results"]["points"] if p["metric"] == "nll"
    ]
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_two_texts_of_one_file_name_are_told_apart(folder, tmp_path):
    paths = [tmp_path / name / "valid.txt" for name in ("a", "b")]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(say(*random_ids(1, 60, seed=number)[0].tolist()))
    values = []
    for texts in (paths, paths[:1], paths[1:]):
        out = tmp_path / f"{len(values)}.json"
        given = [part for path in texts for part in ("--text", str(path))]
        command = ["eval", "ppl", "-m", str(folder), *given, "--window", "16", "--stride", "8"]
        done = CliRunner().invoke(app, [*command, "--out", str(out)])
        assert done.exit_code == 0, done.stderr
        points = json.loads(out.read_text())["results"]["points"]
        values.append([p["value"] for p in points if p["metric"] == "perplexity"])
    assert values[0] == values[1] + values[2]
    tasks = {p["task"] for p in json.loads((tmp_path / "0.json").read_text())["results"]["points"]}
    assert tasks == set(map(str, paths))
