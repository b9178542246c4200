"""The examples run with any model, and what they print fits 80 columns."""

import json
import math
import os
import re
import runpy
import sys

import pytest
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from buddy.errors import FetchError
from buddy.hub.store import ensure_published
from tests.product.serving.serving import served
from tests.test_docs import ROOT
from tests.tiny import VOCAB, tiny_model

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model of six blocks that reads and writes letters."""
    path = tmp_path_factory.mktemp("letters")
    model = tiny_model()
    model.config.max_position_embeddings = 512
    model.save_pretrained(path)
    letters = {"<pad>": 0, "<s>": 1, **{chr(30 + i): i for i in range(2, VOCAB)}}
    tokenizer = Tokenizer(WordLevel(letters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<s>")
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example in this process; its lines, none of them wider than a terminal."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if not line.startswith("/")) <= 80
        return lines

    return run


def test_each_example_is_in_the_table_and_says_how_it_is_run():
    table = (EXAMPLES / "README.md").read_text()
    named = re.findall(r"^\| \[(\w+)\.(?:py|ipynb)\]\(\1\.(?:py|ipynb)\)", table, re.MULTILINE)
    assert sorted(named) == sorted([*SCRIPTS, "first_budget"])
    for name in SCRIPTS:
        assert (
            f"\n    python examples/{name}.py [--model MODEL]"
            in (EXAMPLES / f"{name}.py").read_text()
        )


def test_rows_of_one_batch_run_what_their_budgets_say(run, folder):
    _, *rows = run("mixed_budgets", "--model", folder)
    assert [row.split()[-1] for row in (line[:24] for line in rows)] == ["6"] * 4
    assert [re.search(r"(\d) of 6", row)[1] for row in rows] == ["6", "5", "4", "4"]


def test_a_policy_of_ones_own_spends_each_budget(run, folder):
    head, *rows = run("own_policy", "--model", folder)
    assert head.split()[-3:] == ["90%", "75%", "60%"]
    assert [row.split()[0] for row in rows][1:] == ["comb", "random"]
    assert len({row[34:] for row in rows}) == 3


def test_a_router_is_trained_and_its_checkpoint_runs(run, folder, tmp_path):
    lines = run("train_router", "--model", folder, "--out", tmp_path / "out")
    assert [line.split()[0] for line in lines[-3:-1]] == ["capitals", "sums"]
    assert lines[-1] == "policy of the checkpoint: trained router"
    assert (tmp_path / "out" / "checkpoint" / "buddy.json").exists()


def test_a_figure_is_drawn_of_what_was_measured(run, folder, tmp_path):
    figure = tmp_path / "depth.png"
    *rows, last = run("depth_curve", "--model", folder, "--out", figure)
    assert [int(row.split()[0]) for row in rows] == [3, 4, 5, 6]
    assert last == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def server():
    with served(step_s=0.002) as running:
        yield running


def check_answers(lines, server):
    assert lines[0] == "a token takes at least 2.00 ms here, with the fewest blocks"
    assert [line.split(" ms ")[0].strip() for line in lines[2:5]] == ["4.00", "3.00", "2.20"]
    assert len([line for line in lines if " of 30 blocks, " in line]) == 4
    assert lines[5].startswith("     1.00 ms  1 ms a token is out of reach")
    asked = [request.budget.ms_per_token for request in server.engine.seen]
    assert asked == [math.inf, 4.0, 3.0, 2.2]


def test_a_client_asks_a_server_that_runs(run, server):
    check_answers(run("deadlines", "--url", server.url), server)


def test_a_client_starts_a_server_and_ends_it(run, server, tmp_path, monkeypatch):
    # What stands for Python says of itself what `buddy serve` says (tests/product/serving).
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho $$ "$@" > {tmp_path}/asked\necho engine: some >&2\n'
        f"echo 'address: {server.url}' >&2\nexec sleep 60\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    check_answers(run("deadlines", "--model", "some-model"), server)
    number, asked = (tmp_path / "asked").read_text().split(maxsplit=1)
    assert asked == "-m buddy serve some-model --port 0\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def test_the_notebooks_cells_run_in_order(capsys):
    """In this process, whose libraries are imported: a kernel would import them again."""
    try:
        ensure_published()
    except FetchError as error:
        pytest.skip(f"the default model cannot be had here: {error}")
    notebook = json.loads((EXAMPLES / "first_budget.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * 5
    said, namespace = [], {}
    for cell in cells:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        said.append(capsys.readouterr().out.splitlines())
        assert max(map(len, said[-1])) <= 120
    assert said[0] == ["30 blocks, chosen by: trained router"]
    depths = [re.search(r"(\d+)\.0 blocks", line)[1] for line in said[1]]
    assert depths == ["30", "24", "18", "15"]
    assert {line.count("█") for line in said[2]} == {18}
    losses = [float(line.split()[-1]) for line in said[3]]
    assert losses == sorted(losses)
    assert int(re.match(r"\d+", said[4][1])[0]) <= 70
