"""Help and errors: fast, on one line, with the right exit code. Each runs the real command."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from buddy.hub.presets import PRESETS
from tests.product.cli import forked
from tests.tiny import delete_blocks, tiny_model

BUDDY = [sys.executable, "-m", "buddy"]


def run(*arguments, stdin=None, **environment):
    return forked.run(arguments, {"COLUMNS": "100", **environment}, stdin)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        *(["generate"], ["chat"], ["serve"], ["info"]),
        *(["models"], ["models", "pull"], ["models", "remove"]),
    ],
)
def test_help_does_not_import_torch(arguments):
    code = f"""
import sys
sys.argv = ["buddy", *{arguments!r}, "--help"]
import buddy.cli.main
try:
    buddy.cli.main.main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {{"torch", "transformers", "numpy", "fastapi", "uvicorn"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a word tokenizer, as a local folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 97)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def base_folder(folder, tmp_path_factory):
    """The same without a chat template."""
    path = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").unlink()
    return str(path)


GENERAL = ("--engine", "general")
"""In a home of its own the native engine would be compiled."""


def generate(folder, *arguments, prompt="w3 w5 w9", **environment):
    return run(
        "generate", prompt, "--model", folder, "--max-new-tokens", "6", *arguments, **environment
    )


def test_stdout_carries_only_the_text_and_the_summary_says_what_ran(folder):
    done = generate(folder, "--budget", "4 blocks", "--policy", "random:1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 6
    assert set(done.stdout.split()) <= {f"w{i}" for i in range(97)} | {"<s>", "<pad>"}
    assert "budget 4 blocks · 4 of 6 blocks per token" in done.stderr
    assert "random, seed 1, no trained router" in done.stderr
    assert "tokens/s" in done.stderr


def test_the_summary_says_that_the_context_is_full(folder):
    done = generate(folder, prompt="w3 " * 62)
    assert done.returncode == 0, done.stderr
    told = "3 new tokens · stopped: the context of 64 tokens is full"
    assert [told in line for line in done.stderr.splitlines()] == [False, True]


@pytest.mark.parametrize("prompt", ["w3 w4", ""])
def test_a_forked_command_does_what_one_of_its_own_does(folder, prompt):
    arguments = ["generate", "-m", folder, "--policy", "random", "--max-new-tokens", "4", "-"]
    alone = subprocess.run(
        [*BUDDY, *arguments],
        capture_output=True,
        text=True,
        input=prompt,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    there = forked.run(arguments, stdin=prompt)
    assert (there.returncode, there.stdout) == (alone.returncode, alone.stdout)
    assert there.stderr.splitlines()[:1] == alone.stderr.splitlines()[:1]
    assert alone.returncode == (0 if prompt else 2)


def test_json_trace_and_depth_agree(folder, tmp_path):
    trace = tmp_path / "trace.json"
    done = generate(
        folder, "--budget=0.5", "--policy=random", "--json", "--show-depth", "--trace", str(trace)
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads(trace.read_text())
    assert record["budget_blocks"] == 3
    assert [token["executed"] for token in record["tokens"]] == [3] * 6
    strips = [line for line in done.stderr.splitlines() if "█" in line]
    assert len(strips) == 6
    for strip, token in zip(strips, record["tokens"], strict=True):
        assert [i for i, c in enumerate(strip[:6]) if c == "█"] == token["blocks"]
    assert list(tmp_path.iterdir()) == [trace]


def test_chat_keeps_the_conversation_and_changes_the_budget(folder):
    lines = "w3 w4\n/budget 0.5\nw9\n/budget 7 blocks\n/nonsense\n/reset\nw3 w4\n/exit\n"
    done = run("chat", "-m", folder, "--policy", "random", "--max-new-tokens", "4", stdin=lines)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert "3 of 6 blocks" in done.stderr
    assert "budget of 7 blocks is outside" in done.stderr
    assert "full depth · 6 of 6" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--budget", "abc"], "budget 'abc' cannot be read"),
        (["--budget", "auto"], "trained Budget Predictor"),
        (["--budget", "0.5", "--policy", "full"], "choose another policy"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(folder, arguments, says):
    """A real process; `tests/hostile/test_flags.py` has the table of all."""
    done = generate(folder, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("prompt", "says"),
    [("  ", "prompt is empty"), ("w3 " * 70, "context holds 64")],
)
def test_a_bad_prompt_is_one_line_and_exit_code_2(folder, prompt, says):
    done = generate(folder, prompt=prompt)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nonsense", "no model named 'nonsense'"),
        ("./nowhere", "no model at ./nowhere"),
        ("nobody/nothing", "check the name and the network"),
        ("./nowhere.gguf", "nowhere.gguf"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line_and_exit_code_2(model, says, tmp_path):
    for command in (["generate", "hello", "--model", model], ["info", model]):
        done = run(*command, BUDDY_HOME=str(tmp_path / "home"))
        assert done.returncode == 2
        assert says in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_any_model_runs_at_any_budget_and_says_where_the_order_is_from(folder, tmp_path):
    home = {"BUDDY_HOME": str(tmp_path / "home")}
    needed = "order of a quick cosine pass, measured when a budget first needs it"
    assert json.loads(run("info", folder, "--json", **home).stdout)["order"] == needed
    full = generate(folder, *GENERAL, **home)
    assert "measuring" not in full.stderr
    first = generate(folder, *GENERAL, "--budget", "0.7", **home)
    assert first.returncode == 0, first.stderr
    said, summary, speed = first.stderr.strip().splitlines()
    assert said.startswith("measuring a quick order of the 6 blocks")
    assert "buddy route searches better ones" in said
    assert "order measured now by a quick cosine pass (cached)" in summary
    assert "prefill" in speed
    again = generate(folder, *GENERAL, "--prefill-budget", "0.7", "--json", **home)
    assert "measuring" not in again.stderr
    assert "order of a quick cosine pass (cached)" in again.stderr
    record = json.loads(again.stdout)
    assert record["prior"]["source"] == "order of a quick cosine pass (cached)"
    assert len(record["prior"]["sha256"]) == 64
    cached = json.loads(run("info", folder, "--json", **home).stdout)["order"]
    assert cached == "order of a quick cosine pass (cached)"
    assert cached in run("info", folder, **home).stdout
    [path] = (tmp_path / "home" / "priors").iterdir()
    path.write_text("{")
    chat = ("chat", "-m", folder, *GENERAL, "-b", "0.7", "--max-new-tokens", "2")
    damaged = run(*chat, stdin="w3\n", **home)
    assert damaged.returncode == 0, damaged.stderr
    [warned] = [line for line in damaged.stderr.splitlines() if "measured anew" in line]
    assert str(path) in warned
    assert json.loads(path.read_text())["results"]["removal_order"]


def test_a_prompt_on_stdin_is_the_same_prompt(folder):
    typed = json.loads(generate(folder, "--json").stdout)
    piped = run(
        "generate", "-", "-m", folder, "--max-new-tokens", "6", "--json", stdin="w3 w5 w9\n"
    )
    assert json.loads(piped.stdout)["text"] == typed["text"]
    assert piped.stderr.splitlines()[0].startswith("full depth")


def test_a_model_without_a_chat_template_takes_one_message(base_folder):
    assert generate(base_folder).returncode == 0
    for refused in (
        generate(base_folder, "--system", "w4"),
        run("chat", "-m", base_folder, stdin="w3\n"),
    ):
        assert refused.returncode == 2
        assert "no chat template" in refused.stderr


def test_a_trace_never_replaces_what_is_no_file(folder, tmp_path):
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    done = generate(folder, "--trace", str(fifo))
    assert done.returncode == 2
    assert "no regular file" in done.stderr
    assert fifo.is_fifo()


def test_importance_writes_a_record_that_orders_blocks(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("w3 w5 w9 w4 w8 " * 40)
    for indicator in ("delta-ppl", "sleb"):
        out = tmp_path / f"{indicator}.json"
        arguments = ["--text", str(text), "--tokens", "8", "--windows", "5", "--out", str(out)]
        done = run("importance", folder, "--indicator", indicator, *arguments)
        assert done.returncode == 0, done.stderr
        record = json.loads(out.read_text())
        assert record["config"]["windows"] == 5
        assert sorted(record["results"]["removal_order"]) == [1, 2, 3, 4]
        used = generate(folder, "--budget", "4 blocks", "--policy", f"static:{out}", "--json")
        kept = json.loads(used.stdout)["tokens"][0]["blocks"]
        assert set(range(6)) - set(kept) == set(record["results"]["removal_order"][:2])
    bad = run("importance", folder, "--indicator", "magic", "--out", str(tmp_path / "x.json"))
    assert bad.returncode == 2
    assert "no indicator 'magic'" in bad.stderr


def test_a_checkpoint_with_its_own_backbone_and_tokenizer_answers(folder, tmp_path):
    from buddy import BuddyForCausalLM, load_tokenizer

    model = BuddyForCausalLM.from_pretrained(folder, policy="random:2")
    model.save_pretrained(
        tmp_path / "ckpt", include_backbone=True, tokenizer=load_tokenizer(folder)
    )
    model.save_pretrained(tmp_path / "small")
    for name in ("ckpt", "small"):
        done = generate(str(tmp_path / name), "--budget", "0.5")
        assert done.returncode == 0, done.stderr
        assert "random, seed 2" in done.stderr
        assert run("info", str(tmp_path / name)).returncode == 0
    model.save_pretrained(tmp_path / "mute", include_backbone=True)
    mute = generate(str(tmp_path / "mute"), "--budget", "0.5")
    assert mute.returncode == 2
    assert "save_pretrained" in mute.stderr


def test_a_model_in_the_hubs_cache_needs_no_network(folder, tmp_path):
    repo, commit = forked.hub_home() / "hub/models--org--tiny", "0" * 40
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    home = {"BUDDY_HOME": str(tmp_path)}
    done = generate("org/tiny", *GENERAL, "--budget", "0.5", "--policy", "random", **home)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 6
    rows = json.loads(run("models", "--json", **home).stdout)
    assert rows[-1]["name"] == "org/tiny"
    assert rows[-1]["bytes"] > 0
    removed = run("models", "remove", "org/tiny", **home)
    assert removed.returncode == 0, removed.stderr
    assert generate("org/tiny", **home).returncode == 2


def test_info_counts_blocks_and_costs(folder):
    done = run("info", folder, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    # q, k, v, o with biases, three MLP matrices, two norms; by hand for the tiny config:
    q, kv = 32 * 32 + 32, 2 * (32 * 16 + 16)
    assert facts["params_per_block"] == q + kv + q + 3 * 32 * 48 + 2 * 32
    assert facts["params_outside_blocks"] == 2 * 97 * 32 + 32
    assert facts["kv_bytes_per_token"] == 2 * 16 * 4 * 6
    assert [(row["budget"], row["blocks"]) for row in facts["budgets"]][:5] == [
        (1.0, 6),
        (0.875, 5),
        (0.75, 4),
        (0.625, 4),
        (0.5, 3),
    ]
    beyond = run("info", folder, "--context", "65")
    assert beyond.returncode == 2
    assert "must be at most 64, the context of" in beyond.stderr
    table = run("info", folder)
    assert "params" not in table.stderr
    assert "100.0%" in table.stdout


def test_info_of_a_model_too_shallow_to_route(folder, tmp_path):
    path = tmp_path / "shallow"
    shutil.copytree(folder, path)
    (path / "model.safetensors").unlink()
    delete_blocks(tiny_model("llama"), range(2, 6)).save_pretrained(path)
    done = run("info", str(path), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["blocks"] == 2
    assert {row["blocks"] for row in facts["budgets"]} == {2}
    assert facts["budgets"][0]["budget"] == 1.0
    made = generate(str(path), "--budget", "1.0")
    assert made.returncode == 0, made.stderr
    less = generate(str(path), "--budget", "0.5")
    assert less.returncode == 2
    assert len(less.stderr.strip().splitlines()) == 1
    assert "full depth alone" in less.stderr


def test_models_lists_the_presets(tmp_path):
    done = run("models", "--json", BUDDY_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == list(PRESETS)
    # Routers of the hub's models ship too; the weights take no place until they are fetched.
    whole = ["smollm2-135m-buddy", "smollm2-135m-routed"]
    assert [row["name"] for row in rows if row["bytes"] is not None] == whole
    routed = [row["name"] for row in rows if row["router"]]
    assert routed == [*whole, "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    assert all(row["blocks"] and row["params"] and row["licence"] for row in rows)
    for columns in ("80", "40"):
        piped = run("models", BUDDY_HOME=str(tmp_path), COLUMNS=columns)
        lines = [line.rstrip() for line in piped.stdout.splitlines()]
        assert len(lines) == len(PRESETS) + 1, "a line a model, whatever the terminal's width"
        assert [line.split()[0] for line in lines[1:]] == list(PRESETS)
        assert max(map(len, lines)) <= 80
    missing = run("models", "remove", "nothing", BUDDY_HOME=str(tmp_path))
    assert (missing.returncode, len(missing.stderr.strip().splitlines())) == (2, 1)


def test_a_tokenizer_that_panics_is_one_line(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "panics")
    path = tmp_path / "panics" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated"}
    tokenizer["pre_tokenizer"] = {**split, "invert": False}
    path.write_text(json.dumps(tokenizer))
    done = run("generate", "--raw", "a" * 30_000 + "c", "-m", str(path.parent), RUST_BACKTRACE="0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *rust, last = done.stderr.splitlines()
    assert last.startswith("buddy: the tokenizer, or another library, failed at this: Onig")
    assert len(rust) <= 4, "what Rust says by itself"
