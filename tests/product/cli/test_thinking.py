"""A limit of thinking, and a depth of its own, on the command line."""

import json

import pytest

from tests.product.cli.test_cli import run
from tests.tiny import VOCAB, tiny_buddy
from tests.words import word_tokenizer

MARKS = ["<think>", "</think>"]


def thinking_tokenizer():
    """The words but for the last two, whose places the marks have."""
    tokenizer = word_tokenizer(VOCAB - len(MARKS))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = "{{ messages[0]['content'] }} <think> </think>"
    return tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("thinking") / "model"
    tiny_buddy().save_pretrained(path, tokenizer=thinking_tokenizer())
    return str(path)


def ask(checkpoint, *more):
    asked = ("generate", "w3 <think>", "-m", checkpoint, "--raw", "--json")
    return run(*asked, "--max-new-tokens", "6", *more)


@pytest.mark.parametrize("sampling", [(), ("--temperature", "0.9"), ("--drafts", "ngram")])
def test_thinking_ends_at_its_limit_and_the_answer_has_its_own_depth(checkpoint, sampling):
    budget = "prompt:6 blocks,think:3 blocks,answer:5 blocks"
    done = ask(checkpoint, "--thinking-tokens", "2", "-b", budget, *sampling)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    closes = [step["text"].strip() for step in record["tokens"]].index("</think>")
    assert closes <= 2
    ran = [step["executed"] for step in record["tokens"]]
    # The first token is made by the prompt, and each other one by the token before it.
    assert ran[0] == 6
    assert ran[1 : closes + 1] == [3] * closes
    assert ran[closes + 1] == 5
    assert record["phase_blocks"] == {"prompt": 6, "think": 3, "answer": 5}
    assert ran == [record["phase_blocks"][step["phase"]] for step in record["tokens"]]


def test_thinking_that_the_prompt_has_ended_is_told_of(checkpoint):
    asked = ("generate", "w3", "-m", checkpoint, "--max-new-tokens", "2")
    done = run(*asked, "--thinking-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert "thinking that is over" in " ".join(done.stderr.split())
    assert "thinking that is over" not in run(*asked).stderr


def test_chat_says_what_each_phase_may_run(checkpoint):
    budget = "/budget prompt:6 blocks,think:3 blocks,answer:5 blocks"
    told = run("chat", "-m", checkpoint, "--no-history", "--engine", "general", stdin=f"{budget}\n")
    assert told.returncode == 0, told.stderr
    assert "5 of 6 blocks, thinking at 3, prompt at 6" in told.stderr


def test_a_model_that_does_not_think_refuses_both(tmp_path):
    path = tmp_path / "model"
    tiny_buddy().save_pretrained(path, tokenizer=word_tokenizer())
    for more in (("--thinking-tokens", "2"), ("-b", "prompt:1.0,think:0.6,answer:1.0")):
        done = run("generate", "w3", "-m", str(path), "--raw", *more)
        assert done.returncode != 0
        assert "think" in done.stderr
        assert "Traceback" not in done.stderr
