"""Drafts change neither what is written nor what runs, and each token is shown by its own."""

import json

import pytest

from tests.product.cli.test_cli import run
from tests.tiny import tiny_buddy
from tests.words import word_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts") / "model"
    tiny_buddy().save_pretrained(path, tokenizer=word_tokenizer())
    return str(path)


@pytest.mark.parametrize("drafts", ["ngram", "ngram+3 blocks"])
def test_an_answer_is_that_without_drafts(checkpoint, drafts):
    asked = ("generate", "w3 w5 w9 " * 4, "-m", checkpoint, "--raw", "-b", "5 blocks", "--json")
    plain, drafted = (
        run(*asked, "--max-new-tokens", "12", *more) for more in ((), ("--drafts", drafts))
    )
    assert drafted.returncode == 0, drafted.stderr
    records = [json.loads(done.stdout) for done in (plain, drafted)]
    for name in ("text", "tokens", "new_tokens", "distinct_plans", "blocks_per_token"):
        assert records[1][name] == records[0][name]
    assert len(records[1]["tokens"]) == 12
