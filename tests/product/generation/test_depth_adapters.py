"""Texts of a model whose adapters know the depth: by each engine, with drafts, by the server."""

import openai
import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.engine.executors.graphs import GraphDecoder
from buddy.errors import ModelError
from buddy.serving.rows.engine import ServingThread
from tests.product.backbone.test_depth_scales import has_compiler, made
from tests.product.serving.serving import chat_tokenizer, served
from tests.tiny import random_ids, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("knowing")
    tiny_model("qwen2.5").save_pretrained(path / "base")
    buddy = made(base=BuddyForCausalLM.from_pretrained(path / "base"))
    buddy.save_pretrained(path / "knowing")
    return path / "knowing"


def merged(folder, **options):
    return BuddyForCausalLM.from_pretrained(folder, merge_adapter=True, **options)


def text(buddy, ids, budget, tokens=16, **options):
    options = {"max_new_tokens": tokens, "do_sample": False, **options}
    return buddy.generate(ids, budget=budget, **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("budget", ["3 blocks", "5 blocks"])
def test_drafts_write_the_plain_text(folder, budget):
    buddy, ids = merged(folder), random_ids(1, 5).repeat(1, 3)
    plain = text(buddy, ids, budget)
    assert plain == text(BuddyForCausalLM.from_pretrained(folder), ids, budget)
    assert text(buddy, ids, budget, drafts="ngram") == plain
    if budget == "5 blocks":
        assert text(buddy, ids, budget, drafts="3 blocks") == plain
        assert plain != text(buddy, ids, "3 blocks")


def test_a_draft_at_an_exit_is_no_beginning_of_full_depth(folder):
    buddy, ids = merged(folder, policy="layerskip"), random_ids(1, 7)
    assert text(buddy, ids, "1.0", drafts="3 blocks") == text(buddy, ids, "1.0")


def test_no_graph_is_captured(folder):
    with pytest.raises(ModelError, match="changes from token to token"):
        GraphDecoder(merged(folder).backbone)


@has_compiler
def test_the_server_answers_at_each_depth_what_unmerged_adapters_say(folder):
    tokenizer, buddy = chat_tokenizer(), merged(folder, engine="native")
    slow = BuddyForCausalLM.from_pretrained(folder, engine="general")
    prompt = [10, 11, 12, 13]
    engine = ServingThread(buddy, tokenizer, "tiny")
    with (
        served(engine, tokenizer=tokenizer) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for blocks in (3, 5, 6, 3):  # the last finds its prompt in the cache
            reply = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=12,
                temperature=0,
                extra_body={"budget": f"{blocks} blocks", "ignore_eos": True},
            )
            expected = text(slow, torch.tensor([prompt]), f"{blocks} blocks", 12)
            wanted = tokenizer.decode(expected, skip_special_tokens=True)
            assert reply.choices[0].text.split() == wanted.split(), blocks
