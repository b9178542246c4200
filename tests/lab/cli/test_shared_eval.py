"""`buddy eval` and `buddy search` as two processes of one launch: what one process finds."""

import json

import pytest
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.lab.evaluation.samples import read_samples
from tests.product.cli.launched import run_two
from tests.tiny import random_ids, tiny_model
from tests.words import say, word_tokenizer

PLAIN = {"TQDM_DISABLE": "1"}
"""As a command sets it before it imports tqdm, which the process that is forked has imported."""
BUDGETS = ["--policy", "random", "-b", "1.0", "-b", "4 blocks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, a text, rows, dialogues and tasks in its words, and a removal order."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    (path / "words.txt").write_text(say(*random_ids(1, 100)[0].tolist()))
    order = {"kind": "importance-sleb", "config": {}, "results": {"removal_order": [3, 1, 4, 2]}}
    (path / "order.json").write_text(json.dumps(order))
    rows = {
        "rows": [{"prompt": say(3, 4 + n), "completion": f" {say(5 + n)}"} for n in range(5)],
        "samsum/validation": [
            {"id": str(n), "dialogue": say(*range(3, 9 + n)), "summary": say(4)} for n in range(5)
        ],
        "piqa/validation": [
            {"goal": say(3 + n, 4), "sol1": say(5 + n), "sol2": say(6 + n, 7), "label": n % 2}
            for n in range(5)
        ],
    }
    for name, values in rows.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, values)))
    return path


def command(folder, name, out):
    data = ["--data-dir", str(folder)]
    text = ["--text", str(folder / "words.txt"), "--tokens", "9", "--batch", "2"]
    order = ["--order", str(folder / "order.json"), "--depths", "5,3", "--windows", "5"]
    own = {
        "search": ["search", str(folder), *order, *text],
        "ppl": ["eval", "ppl", *text, "--stride", "4", "--limit", "7", *BUDGETS],
        "answers": ["eval", "answers", str(folder / "rows.jsonl"), "--batch", "2", *BUDGETS],
        "rouge": ["eval", "rouge", *data, "--max-new-tokens", "3", "--batch", "2", *BUDGETS],
        "tasks": ["eval", "tasks", *data, "--task", "piqa", "--batch", "2", *BUDGETS],
    }[name]
    model = [] if name == "search" else ["--model", str(folder)]
    return [*own, *model, "--out", str(out)]


@pytest.mark.parametrize("name", ["search", "ppl", "answers", "rouge", "tasks"])
def test_two_processes_write_and_print_what_one_does(folder, tmp_path, name):
    two, one = tmp_path / "two.json", tmp_path / "one.json"
    done, other = run_two(command(folder, name, two), tmp_path, PLAIN)
    assert (done.returncode, other) == (0, 0), done.stderr
    alone = CliRunner().invoke(app, command(folder, name, one), catch_exceptions=False)
    assert done.stdout == f"{two}\n"
    shown = [line for line in alone.stderr.splitlines() if "it/s]" not in line]  # tqdm's, here
    assert [line for line in done.stderr.splitlines() if line.strip()] == [
        line for line in shown if line.strip()
    ]
    found, expected = (json.loads(path.read_text()) for path in (two, one))
    assert found["results"] == expected["results"]
    assert found["machine"]["processes"] == 2
    if name != "search":
        shared, own = (read_samples(path.with_suffix(".samples.jsonl")) for path in (two, one))
        assert shared.entries == own.entries
        assert shared.conditions == own.conditions


def test_more_rows_go_on_from_what_one_process_left(folder, tmp_path):
    two, one = tmp_path / "two.json", tmp_path / "one.json"
    some = CliRunner().invoke(app, [*command(folder, "answers", two), "--limit", "2"])
    assert some.exit_code == 0, some.stderr
    done, _ = run_two(command(folder, "answers", two), tmp_path, PLAIN)
    assert done.stderr.count("going on from 4 samples") == 1
    CliRunner().invoke(app, [*command(folder, "answers", one), "--limit", "2"])
    CliRunner().invoke(app, command(folder, "answers", one), catch_exceptions=False)
    found, expected = (json.loads(path.read_text())["results"] for path in (two, one))
    assert found == expected
