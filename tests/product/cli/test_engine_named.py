"""The commands say which engine ran, why the fast engine did not, and what was compiled."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from buddy.cli.main import app
from buddy.engine.executors.native.decoder import MOST_BESIDE_TORCH
from buddy.engine.executors.native.instructions import best_set
from buddy.engine.executors.native.library import native_library
from buddy.errors import ModelError
from tests.product.policies.made import gated
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
MOST = MOST_BESIDE_TORCH["float32"]
NATIVE = f"native engine ({best_set().name})"


def save(path, family):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tiny_model(family).save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 97)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save(tmp_path_factory.mktemp("gemma"), "gemma")


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """A cache folder without a kernel, and a compiler that makes one at once."""
    good = native_library().calls._name
    path = tmp_path / "cc"
    copy = f'for w; do [ "$l" = -o ] && out=$w; l=$w; done; cp {good} "$out"'
    path.write_text(f"#!/bin/sh\n{copy}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setenv("BUDDY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(app, [*arguments], input=stdin)


def generate(model, *arguments):
    return invoke("generate", "w3 w5", "-m", model, "--max-new-tokens", "4", *arguments)


def test_the_engine_that_ran_closes_the_summary_and_is_in_the_json(llama):
    done = generate(llama, "--json")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"4 new tokens · {NATIVE}")
    record = json.loads(done.stdout)
    assert record["instructions"] == best_set().name
    assert (record["engine"], record["engine_reason"]) == ("native", None)


def test_why_it_is_the_general_engine_is_told(gemma):
    done = generate(gemma, "--json")
    assert done.exit_code == 0, done.stderr
    reason = "the native kernel does not know model type 'gemma'"
    assert f"general engine ({reason}" in done.stderr.splitlines()[-1]
    record = json.loads(done.stdout)
    assert record["engine"] == "general"
    assert record["engine_reason"].startswith(reason)
    assert record["compile_s"] is None


def test_one_line_on_stderr_says_what_the_general_engine_costs_and_what_to_do(llama, tmp_path):
    environment = {"CC": "", "PATH": "", "BUDDY_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "buddy", "chat", "-m", llama, "--max-new-tokens", "3"],
        input="w3 w4\nw5\n",
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reason = "no C compiler was found: install gcc or clang"
    [line] = [line for line in done.stderr.splitlines() if "several times as long" in line]
    assert reason in line
    shown = " ".join(done.stderr.split())
    assert shown.count(f"kv lazy · general engine ({reason})") == 1
    assert shown.count("· 3 tokens") == 2


def test_native_that_cannot_be_had_is_refused_with_the_reason(gemma):
    done = generate(gemma, "--engine", "native")
    assert isinstance(done.exception, ModelError)
    assert "model type 'gemma'" in str(done.exception)
    assert done.stdout == ""


def test_a_compiled_kernel_is_told_once_and_apart_from_the_speed(llama, compiles):
    done = invoke("chat", "-m", llama, "--max-new-tokens", "3", stdin="w3 w4\nw5\n")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("compiled the native engine in") == 1
    assert "s, once for this machine" in done.stderr
    assert " ".join(done.stderr.split()).count(f"kv lazy · {NATIVE}") == 1
    assert done.stderr.count("· 3 tokens") == 2
    record = json.loads(generate(llama, "--json").stdout)
    assert record["compile_s"] > 0


def test_a_kernel_that_cannot_be_kept_is_told_with_the_reason(llama, compiles):
    compiles.mkdir()
    (compiles / "native").write_text("a file")
    done = generate(llama)
    assert done.exit_code == 0, done.stderr
    assert "and it cannot be kept" in done.stderr
    assert str(compiles / "native") in done.stderr
    assert "BUDDY_HOME" in done.stderr


def test_a_budget_is_refused_before_anything_is_compiled(llama, compiles):
    done = generate(llama, "--budget", "99 blocks")
    assert "budget of 99 blocks" in str(done.exception)
    assert not Path(compiles).exists()


@pytest.mark.parametrize(
    ("batch", "engine", "shown"),
    [
        (2, "native", f"decode: {NATIVE}"),
        (
            MOST + 1,
            "general",
            f"decode: general engine (the native engine takes no steps of {MOST + 1} new",
        ),
    ],
)
def test_bench_names_the_engine_that_ran(llama, tmp_path, batch, engine, shown):
    out = tmp_path / "speed.json"
    short = ["--context", "4", "--new-tokens", "2", "--rounds", "1", "-b", "1.0"]
    done = invoke("bench", "-m", llama, "--out", str(out), *short, "--batch", str(batch))
    assert done.exit_code == 0, done.stderr
    assert shown in done.stderr
    record = json.loads(out.read_text())
    assert record["config"]["engine"] == engine
    assert (record["config"]["engine_reason"] is None) == (engine == "native")
    assert [row["engine"] for row in record["results"]["rounds"]] == [None, engine]


def test_bench_names_the_policy_whose_steps_the_fast_path_does_not_take(tmp_path):
    model, out = tmp_path / "model", tmp_path / "speed.json"
    gated("flexidepth").save_pretrained(model, include_backbone=True)
    short = ["--context", "4", "--new-tokens", "2", "--rounds", "1", "-b", "1.0"]
    done = invoke("bench", "-m", str(model), "--out", str(out), "--no-transformers", *short)
    assert done.exit_code == 0, done.stderr
    record = json.loads(out.read_text())
    assert [row["engine"] for row in record["results"]["rounds"]] == ["native", "general"]
    assert record["config"]["engine"] == "general and native"
    assert record["config"]["engine_reason"] == "the native engine takes no steps of flexidepth"
