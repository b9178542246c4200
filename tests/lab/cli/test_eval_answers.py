"""`buddy data`, `buddy eval answers` and `buddy search` from file to record; with a tiny model."""

import hashlib
import json
import random
import re
import statistics

import pytest
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.errors import BudgetError, DataError, PolicyError, ResultError
from tests.tiny import NUM_BLOCKS, VOCAB, tiny_model
from tests.words import say, word_tokenizer

BUDGETS = ["-b", "1.0", "-b", "4 blocks"]
ORDER = [3, 1, 4, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, rows in its words, a task's training rows and a removal order."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    draw = random.Random(0)

    def words(count):
        return say(*(draw.randrange(3, VOCAB) for _ in range(count)))

    rows = [
        {"prompt": words(3 + n), "completion": " " + words(1 + n % 4), "source": "xy"[n % 2]}
        for n in range(8)
    ]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "words.txt").write_text(words(200))
    (path / "piqa").mkdir()
    piqa = [{"goal": f"g {n}", "sol1": "s", "sol2": "t", "label": n % 2} for n in range(6)]
    (path / "piqa" / "train.jsonl").write_text("\n".join(map(json.dumps, piqa)))
    order = {"kind": "importance-sleb", "config": {}, "results": {"removal_order": ORDER}}
    (path / "order.json").write_text(json.dumps(order))
    return path


def answers(folder, out, *arguments):
    return [
        *["eval", "answers", str(folder / "rows.jsonl"), "--model", str(folder)],
        *["--out", str(out), "--policy", "random", "--policy", "static:3,1", *arguments],
    ]


def search(folder, out, *arguments):
    return [
        *["search", str(folder), "--order", str(folder / "order.json"), "--out", str(out)],
        *["--depths", "5,3", *arguments],
    ]


def results(path):
    return json.loads(path.read_text())["results"]


def test_a_record_a_table_and_its_path_on_stdout(folder, tmp_path):
    out = tmp_path / "answers.json"
    done = CliRunner().invoke(app, answers(folder, out, *BUDGETS, "--shuffle-plans", "0"))
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}\n"
    record = json.loads(out.read_text())
    assert record["kind"] == "eval-answers"
    assert record["config"]["shuffle_plans"] == 0
    points = record["results"]["points"]
    assert {(p["label"], p["task"]) for p in points} == {
        (label, task) for label in ("full", "random", "static:3,1") for task in ("all", "x", "y")
    }
    assert {point["within"] for point in record["results"]["exchanged"]} == {"all", "source"}
    shown = next(p for p in points if (p["label"], p["task"]) == ("random", "all"))
    assert f"{shown['value']:.3f}±{shown['stderr']:.3f}" in done.stderr
    for word in ("full", "static:3,1", "same source"):
        assert word in done.stderr


def test_other_rows_and_a_shuffle_go_on_from_what_there_is(folder, tmp_path):
    out, fresh = tmp_path / "answers.json", tmp_path / "fresh.json"
    some = answers(folder, out, *BUDGETS, "--stop", "3", "--start", "1")
    CliRunner().invoke(app, some, catch_exceptions=False)
    assert {p["samples"] for p in results(out)["points"] if p["task"] == "all"} == {2}
    shuffled = [*BUDGETS, "--shuffle-plans", "4"]
    more = CliRunner().invoke(app, answers(folder, out, *shuffled), catch_exceptions=False)
    assert "going on from 6 samples" in more.stderr  # 2 rows, 3 conditions
    CliRunner().invoke(app, answers(folder, fresh, *shuffled), catch_exceptions=False)
    for part in ("points", "exchanged"):
        for resumed, two in zip(results(out)[part], results(fresh)[part], strict=True):
            # Other batches: sums in another order.
            near = {name: pytest.approx(two[name], abs=1e-5) for name in ("value", "stderr")}
            assert resumed == two | near
    other = CliRunner().invoke(app, answers(folder, out, "--template", "alpaca"))
    assert isinstance(other.exception, ResultError)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--start", "8"], DataError, "no usable row"),
        (["--max-tokens", "65"], DataError, "at most 64, the model's context"),
        (["--stop", "1", "--shuffle-plans", "0"], DataError, "2 examples or more"),
        (["-b", "2 blocks"], BudgetError, "budget of 2 blocks"),
        (["--policy", "searched:x.json", "-b", "4 blocks"], ResultError, "cannot be read"),
    ],
)
def test_answers_refused_before_a_record_is_written(folder, tmp_path, arguments, error, message):
    out = tmp_path / "answers.json"
    done = CliRunner().invoke(app, answers(folder, out, *arguments))
    assert isinstance(done.exception, error), done.exception
    assert message in str(done.exception)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["text", "answers"])
def test_searched_sets_are_a_policy_that_loses_what_the_search_says(folder, tmp_path, kind):
    out, measured = tmp_path / "sets.json", tmp_path / "answers.json"
    if kind == "text":
        source = ["--text", str(folder / "words.txt"), "--tokens", "20", "--windows", "4"]
    else:
        source = ["--answers", str(folder / "rows.jsonl"), "--windows", "6", "--tokens", "60"]
    done = CliRunner().invoke(app, search(folder, out, *source), catch_exceptions=False)
    assert done.stdout == f"{out}\n"
    found = results(out)
    assert found["removal_order"] == ORDER
    assert {int(depth): len(blocks) for depth, blocks in found["sets"].items()} == {5: 5, 3: 3}
    assert sum(found["swaps"].values()) > 0
    for depth, blocks in found["sets"].items():
        assert (found["nll"][depth] < found["first_nll"][depth]) == (found["swaps"][depth] > 0)
        assert f"{depth} blocks: " in done.stderr
        assert " ".join(map(str, blocks)) in done.stderr
    command = [
        *["eval", "answers", str(folder / "rows.jsonl"), "--model", str(folder), "--stop", "6"],
        *["--policy", f"searched:{out}", "-b", "5 blocks", "-b", "3 blocks"],
        *["--out", str(measured)],
    ]
    CliRunner().invoke(app, command, catch_exceptions=False)
    for entry in results(measured)["execution"]:
        ran = [block for block in range(NUM_BLOCKS) if entry["rates"][block] == 1]
        assert ran == found["sets"][str(entry["blocks"])]
    if kind == "answers":
        for point in results(measured)["points"]:
            if (point["task"], point["metric"]) == ("all", "nll"):
                expected = found["nll"][str(point["blocks"])]
                assert point["value"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--depths", "5,x"], BudgetError, "--depths takes block counts"),
        (["--depths", "4,9"], PolicyError, "to 6 blocks, got 9"),
        (["--order", "rows.jsonl"], ResultError, "rows.jsonl"),
        (["--out", "/nowhere/s.json"], ResultError, "there is no folder"),
    ],
)
def test_searches_refused(folder, tmp_path, monkeypatch, arguments, error, message):
    monkeypatch.chdir(folder)
    out = tmp_path / "sets.json"
    text = ["--text", str(folder / "words.txt"), "--tokens", "20"]
    done = CliRunner().invoke(app, search(folder, out, *text, *arguments))
    assert isinstance(done.exception, error), done.exception
    assert message in str(done.exception)
    assert not out.exists()


def test_a_search_says_when_it_has_fewer_rows_than_asked_for(folder, tmp_path):
    source = ["--answers", str(folder / "rows.jsonl"), "--tokens", "60", "--windows", "99"]
    source += ["--max-swaps", "0"]
    done = CliRunner().invoke(app, search(folder, tmp_path / "sets.json", *source))
    assert done.exit_code == 0, done.exception
    rows = len((folder / "rows.jsonl").read_text().splitlines())
    assert f"rows.jsonl gives {rows} of the 99 rows asked for" in " ".join(done.stderr.split())


def test_training_rows_are_written_whole(folder, tmp_path):
    out = tmp_path / "mix.jsonl"
    command = ["data", "piqa", "--data-dir", str(folder), "--out", str(out), "--rows", "4"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.stdout == f"{out}\n"
    assert "piqa: 4 rows" in done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4
    assert {row["source"] for row in rows} == {"piqa"}
    before = out.read_text()
    again = CliRunner().invoke(app, [*command, "--seed", "1"], catch_exceptions=False)
    assert again.exit_code == 0
    assert out.read_text() != before
    refused = CliRunner().invoke(app, [*command[:1], "boolq", *command[2:]])
    assert isinstance(refused.exception, DataError)
    assert len(out.read_text().splitlines()) == 4
    assert list(tmp_path.iterdir()) == [out]


def logged(path):
    """Losses and tokens of the answers by row, by condition."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    measured = [entry["condition"] for entry in lines if "condition" in entry]
    keys = {entry["label"]: entry["key"] for entry in measured}
    return {
        label: {
            entry["key"].removeprefix(f"{key} "): entry
            for entry in lines
            if entry.get("key", "").startswith(f"{key} ")
        }
        for label, key in keys.items()
    }


def compared(folder, out, *arguments):
    command = ["eval", "answers", str(folder / "rows.jsonl"), "--model", str(folder)]
    return CliRunner().invoke(app, [*command, "--out", str(out), "-b", "4 blocks", *arguments])


def test_differences_from_an_earlier_run_are_taken_row_by_row(folder, tmp_path):
    first, two = tmp_path / "one.json", tmp_path / "two.json"
    samples = first.with_suffix(".samples.jsonl")
    assert compared(folder, first, "--policy", "static:3,1").exit_code == 0
    done = compared(folder, two, "--policy", "random", "--against", str(samples))
    assert done.exit_code == 0, done.exception
    theirs = logged(samples)["static:3,1"]
    ours = logged(two.with_suffix(".samples.jsonl"))["random"]
    assert ours.keys() == theirs.keys()
    gaps = [(ours[row]["nll"] - theirs[row]["nll"]) / ours[row]["tokens"] for row in ours]
    record = json.loads(two.read_text())
    found = {(p["task"], p["metric"]): p for p in record["results"]["against"]}
    point = found["all", "answer_nll"]
    assert point["value"] == pytest.approx(statistics.fmean(gaps))
    assert point["stderr"] == pytest.approx(statistics.stdev(gaps) / len(gaps) ** 0.5)
    assert (point["samples"], point["blocks"]) == (8, 4)
    assert (point["label"], point["minus"]) == ("random", "static:3,1")
    assert {task for task, _ in found} == {"all", "x", "y"}
    told = record["config"]["against"]
    assert told["sha256"] == hashlib.sha256(samples.read_bytes()).hexdigest()
    assert told["run"]["model"]["base"] == record["model"]["base"]
    assert f"{point['value']:+.3f} ± {point['stderr']:.3f}" in done.stderr
    # The second run is the same as the first where both ran the same.
    same = compared(folder, tmp_path / "three.json", "--policy", "static:1,3", "--against", samples)
    assert same.exit_code == 0, same.exception
    again = results(tmp_path / "three.json")["against"]
    assert {point["value"] for point in again} == {0.0}


def test_differences_from_other_rows_budgets_and_files_are_refused(folder, tmp_path):
    first = tmp_path / "one.json"
    samples = str(first.with_suffix(".samples.jsonl"))
    assert compared(folder, first, "--policy", "random", "--stop", "5").exit_code == 0
    for number, (arguments, says) in enumerate(
        [
            (["--against", samples], "lacks 3 of the 8 rows"),
            (["--against", samples, "--stop", "5", "-b", "1.0"], "nothing at 6 of 6 blocks, but 4"),
            (["--against", str(folder / "rows.jsonl")], "no sample log"),
            (["--against", str(tmp_path / "none")], "cannot be read"),
        ]
    ):
        out = tmp_path / f"refused-{number}.json"
        done = compared(folder, out, "--policy", "random", *arguments)
        assert isinstance(done.exception, ResultError), done.exception
        assert says in str(done.exception)
        assert "\n" not in str(done.exception)
        assert not out.exists()


def test_samples_of_a_model_that_was_trained_anew_are_refused(folder, tmp_path):
    path, out = tmp_path / "model", tmp_path / "answers.json"
    word_tokenizer().save_pretrained(path)
    for seed in (0, 1):
        tiny_model("llama", seed=seed).save_pretrained(path)
        done = CliRunner().invoke(app, [*answers(folder, out), "--model", str(path)])
    assert isinstance(done.exception, ResultError), done.exception
    assert re.search(r"other model\.base \(was .*, is .*\): delete it", str(done.exception))
