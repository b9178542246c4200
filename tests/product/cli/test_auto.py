"""`--budget auto` on the command line. Each test runs the real command."""

import json

import pytest

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.routing.measured_constant import MeasuredConstant
from tests.product.cli.test_cli import run
from tests.product.generation.test_ledger_budget import with_ledger
from tests.tiny import tiny_buddy
from tests.words import word_tokenizer

PROMPTS = ("w3 w5 w9", "w41 w7", "w11 w30 w5 w5", "w90 w12 w8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("auto") / "model"
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tiny_buddy(predictor=True).save_pretrained(path, tokenizer=tokenizer)
    return str(path)


def test_the_summary_says_what_was_chosen(checkpoint):
    model = BuddyForCausalLM.from_pretrained(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    chosen = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        chosen[prompt] = model(ids, budget="auto").executed_blocks.item()
    assert len(set(chosen.values())) > 1
    for prompt in PROMPTS[:2]:
        done = run(
            *("generate", prompt, "-m", checkpoint, "--raw", "-b", "AUTO", "--json"),
            *("--max-new-tokens", "3"),
        )
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["budget_blocks"] == chosen[prompt]
        assert {token["executed"] for token in record["tokens"]} == {chosen[prompt]}
        assert f"auto: {chosen[prompt]} of 6 blocks · " in done.stderr


@pytest.mark.parametrize("gain", [0.1, 0.9])
def test_auto_says_where_a_constant_is_as_good(tmp_path, gain):
    model, folder = tiny_buddy(predictor=True), str(tmp_path / "model")
    model.predictor.constant = MeasuredConstant(
        blocks=4, by_kind={"maths": 3, "talk": 5}, rows=9, gain=gain, error=0.2
    )
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    model.save_pretrained(folder, tokenizer=tokenizer)
    chat = run("chat", "-m", folder, stdin="/budget auto\n/budget 0.5\n/exit\n")
    info = run("info", folder)
    done = run("generate", "w3 w5", "-m", folder, "--raw", "-b", "auto", "--max-new-tokens", "2")
    fixed = run("generate", "w3 w5", "-m", folder, "--raw", "-b", "0.7", "--max-new-tokens", "2")
    assert (done.returncode, info.returncode) == (0, 0), (done.stderr, info.stderr)
    assert model.predictor.constant.describe() in " ".join(info.stdout.split())
    note = "(a constant 4 blocks is as good: buddy info)"
    assert (note in done.stderr) == (gain == 0.1)
    assert " ".join(chat.stderr.split()).count(f"up to 6 blocks {note}") == (gain == 0.1)
    assert chat.stderr.count("as good") == (gain == 0.1)
    assert note not in fixed.stderr
    assert json.loads(run("info", folder, "--json").stdout)["auto"].count("maths 3, talk 5") == (
        gain == 0.1
    )


def test_chat_chooses_for_each_turn(checkpoint):
    lines = "/budget auto\nw3 w5 w9\n/budget 0.5\nw3\n/exit\n"
    done = run("chat", "-m", checkpoint, "--max-new-tokens", "3", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "auto: chosen for each turn, up to 6 blocks" in done.stderr
    assert " of 6 blocks · " in done.stderr
    assert "budget 0.5 · 3 of 6" in done.stderr


def test_chat_and_generate_take_a_mean(tmp_path):
    folder, tokenizer = str(tmp_path / "model"), word_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    with_ledger("qwen3").save_pretrained(folder, tokenizer=tokenizer)
    done = run("chat", "-m", folder, "--max-new-tokens", "3", stdin="/budget mean:0.75\nw3 w5\n")
    assert done.returncode == 0, done.stderr
    assert "mean:0.75: chosen for each token, up to 6 blocks" in done.stderr
    done = run("generate", "w3", "-m", folder, "--raw", "-b", "mean:0.75", "--json")
    record = json.loads(done.stdout)
    assert record["budget_blocks"] is None
    ran = [token["executed"] for token in record["tokens"]]
    assert ran[0] == 4
    assert sum(ran[1:]) <= 4.5 * len(ran[1:])


def test_the_prompt_may_have_a_budget_of_its_own(checkpoint):
    done = run(
        *("generate", "w3 w5 w9", "-m", checkpoint, "--raw", "-b", "0.5", "--json"),
        *("--prefill-budget", "1.0", "--max-new-tokens", "4"),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert [token["executed"] for token in record["tokens"]] == [6, 3, 3, 3]
    assert record["prefill_budget"] == "1.0"
    assert "prefill 1.0: 6 blocks in the prompt, 3 after" in done.stderr
    chat = run("chat", "-m", checkpoint, "-b", "0.5", "--prefill-budget", "7", stdin="w3\n")
    assert chat.returncode == 2
    assert chat.stderr.count("\n") == 1
    assert "budget 7 is not allowed" in chat.stderr
