"""`buddy observe` and the SLEB options, each as the real command."""

import json
import signal
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.backbone.backbone import Backbone
from buddy.cli.main import app
from buddy.files import alone
from buddy.importance.calibration import cut_windows
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.measure import measure
from tests.product.cli import forked, test_cli
from tests.tiny import delete_blocks, tiny_model

folder = test_cli.folder
run = test_cli.run


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{2 + (i * i + i // 7) % 95}" for i in range(400)))
    return str(path)


@pytest.mark.parametrize("arguments", [[], ["ranks"], ["context"]])
def test_help_does_not_import_torch(arguments):
    test_cli.test_help_does_not_import_torch(["observe", *arguments])


def test_ranks_of_every_indicator_and_text(folder, text, tmp_path):
    out = tmp_path / "ranks.json"
    arguments = ["--text", text, "--inputs", "5", "--tokens", "12", "--out", str(out)]
    done = run(
        "observe", "ranks", folder, "--indicator", "delta-ppl", "--indicator", "taylor", *arguments
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    record = json.loads(out.read_text())
    assert record["kind"] == "observe-ranks"
    assert record["config"]["inputs"] == 5
    assert record["command"].startswith("buddy observe ranks")
    series = record["results"]["series"]
    assert [(entry["indicator"], entry["text"]) for entry in series] == [
        ("delta-ppl", text),
        ("taylor", text),
    ]
    for entry in series:
        assert len(entry["ranks"]) == 5
        assert all(sorted(row) == list(range(6)) for row in entry["ranks"])
        assert -1 <= entry["agreement"]["spearman_between_inputs"] <= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ranks.json", "text.txt"]


def test_ranks_as_the_context_grows(folder, text, tmp_path):
    out = tmp_path / "context.json"
    contexts = ["--from", "8", "--to", "16", "--every", "4", "--inputs", "4"]
    done = run("observe", "context", folder, *contexts, "--text", text, "--out", str(out))
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["kind"] == "observe-context"
    results = record["results"]
    assert (results["indicator"], results["text"]) == ("delta-ppl", text)
    assert results["contexts"] == [8, 12, 16]
    for name in ("ranks", "stderr"):
        assert [len(row) for row in results[name]] == [6, 6, 6]
    assert results["stretches"]["tokens"] == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ranks", "--indicator", "magic"], "no indicator 'magic'"),
        (["ranks", "--inputs", "90", "--tokens", "12"], "less than the 90 inputs"),
        (["ranks", "--tokens", "65"], "do not fit the model's context of 64"),
        (["context", "--from", "8", "--to", "17", "--every", "4"], "numbers that meet"),
        (["context", "--from", "8", "--to", "8"], "numbers that meet"),
        (["context", "--text", "wikitext2", "--from", "8", "--to", "40"], "--data-dir"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(folder, text, tmp_path, arguments, says):
    source = [] if "--text" in arguments else ["--text", text]
    out = str(tmp_path / "x.json")
    done = run("observe", arguments[0], folder, *arguments[1:], *source, "--out", out)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_checkpoint_is_measured_with_its_adapter_in_the_weights(folder, text, tmp_path):
    adapted = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model = BuddyForCausalLM(adapted.eval(), policy="full")
    model.save_pretrained(tmp_path / "model", tokenizer=load_tokenizer(folder))
    whole, out = str(tmp_path / "model"), tmp_path / "out.json"
    asked = ["--indicator", "taylor", "--text", text, "--tokens", "12", "--out", str(out)]
    done = run("importance", whole, *asked, "--windows", "5")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["results"]["importance"]
    windows = cut_windows(load_tokenizer(folder), Path(text).read_text(), tokens=12, limit=5)
    plain = Backbone(adapted.merge_and_unload())
    expected = measure(build_indicator("taylor", plain), windows).tolist()
    assert found == pytest.approx(expected, rel=1e-4)  # another order of sums
    done = run("observe", "ranks", whole, *asked, "--inputs", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["results"]["series"][0]["scores"][0]
    alone = measure(build_indicator("taylor", plain), windows[:1]).tolist()
    assert found == pytest.approx(alone, rel=1e-4)


def test_small_models_keep_their_protected_blocks_and_one_block_has_no_rank(folder, text, tmp_path):
    out = tmp_path / "out.json"
    asked = ["--text", text, "--tokens", "8", "--out", str(out)]
    for gone in ((2,), (1, 2, 3, 4, 5)):
        made = tmp_path / f"without-{len(gone)}"
        delete_blocks(tiny_model(), gone).save_pretrained(made)
        load_tokenizer(folder).save_pretrained(made)
    done = run("importance", str(tmp_path / "without-1"), "--protect", "plus", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["results"]["removal_order"] == []
    done = run("observe", "ranks", str(tmp_path / "without-5"), "--inputs", "2", *asked)
    assert done.returncode == 2
    assert "a model of one block has no ranking" in done.stderr


def sleb(folder, text, out, *arguments):
    windows = ["--text", text, "--tokens", "8", "--windows", "5"]
    return ["importance", folder, "--indicator", "sleb", *windows, "--out", str(out), *arguments]


def test_sleb_removes_as_many_blocks_as_asked(folder, text, tmp_path):
    orders = []
    for arguments in ([], ["--rounds", "2"]):
        out = tmp_path / "order.json"
        done = run(*sleb(folder, text, out, *arguments))
        assert done.returncode == 0, done.stderr
        orders.append(json.loads(out.read_text())["results"]["removal_order"])
    assert [len(order) for order in orders] == [4, 2]
    assert orders[0][:2] == orders[1]
    for arguments, says in (
        (["--rounds", "5"], "0 to 4 of 6"),
        (["--protect", "none"], "sleb always keeps the ends"),
        (["--rounds", "1", "--indicator", "taylor"], "--rounds is for sleb"),
    ):
        done = run(*sleb(folder, text, out, *arguments))
        assert done.returncode == 2
        assert says in done.stderr


def test_ctrl_c_says_how_to_go_on_and_loses_nothing(folder, text, tmp_path):
    out, partial = tmp_path / "order.json", tmp_path / ".order.json.partial"
    # A signal from outside would come at any time; this one comes in the middle of a round.
    code = """
import os, signal
from buddy.importance.search import bounded as cheapest
visit = cheapest.Losses.unvisited
def stop(self, candidates, batch):
    if batch == 1:
        os.kill(os.getpid(), signal.SIGINT)
    return visit(self, candidates, batch)
cheapest.Losses.unvisited = stop
"""
    done = forked.run(sleb(folder, text, out), before=code)
    assert done.returncode == 128 + signal.SIGINT
    assert "the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert partial.exists()
    assert not out.exists()
    assert run(*sleb(folder, text, out)).returncode == 0
    assert len(json.loads(out.read_text())["results"]["removal_order"]) == 4
    assert not partial.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["importance"],
        ["importance", "--indicator", "sleb"],
        ["observe", "ranks", "--inputs", "2"],
        ["search", "--depths", "4", "--order", "{order}"],
    ],
)
def test_of_two_measurements_for_one_record_the_second_is_refused(folder, text, tmp_path, command):
    out, order = tmp_path / "found.json", tmp_path / "order.json"
    results = {"removal_order": [1, 2, 3, 4]}
    order.write_text(json.dumps({"kind": "importance-x", "config": {}, "results": results}))
    command = [part.format(order=order) for part in command]
    command += [folder, "--text", text, "--tokens", "8", "--out", str(out)]
    with alone(out):
        done = CliRunner().invoke(app, command)
    assert f"another run is writing to {out}" in str(done.exception)
    assert not out.exists()
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", ["importance", "search"])
def test_what_was_found_is_kept_until_the_record_is_written(folder, text, tmp_path, command):
    out, order = tmp_path / "found.json", tmp_path / "order.json"
    arguments = sleb(folder, text, out)
    if command == "search":
        assert run(*sleb(folder, text, order)).returncode == 0
        windows = ["--text", text, "--tokens", "8", "--windows", "5"]
        arguments = ["search", folder, "--order", str(order), "--depths", "4", *windows]
        arguments += ["--out", str(out)]
    code = """
from buddy.errors import ResultError
from buddy.records import RunRecord
def full(self, path):
    raise ResultError("no space left")
RunRecord.save = full
"""
    failed = forked.run(arguments, before=code)
    assert failed.returncode == 2
    assert "no space left" in failed.stderr
    assert [path.name for path in tmp_path.glob(".*")] == [".found.json.partial"]
    assert run(*arguments).returncode == 0
    assert list(tmp_path.glob(".*")) == []
