"""Drafts by the first blocks that the verification goes on from, beside the path that computes
all blocks again."""

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.engine.naive import naive_hidden
from buddy.generation import speculative
from tests.tiny import NUM_BLOCKS, every_kv_policy, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("long_drafts")
engines = pytest.mark.parametrize("engine", ["auto", "general"])


def exits_at_once(family="llama", **options):
    """A model whose blocks after the third add little, so that drafts are often right."""
    model = tiny_model(family)
    with torch.no_grad():
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.2
    return BuddyForCausalLM(model, policy="layerskip", **options)


def slow_path(monkeypatch, buddy, *args, **options):
    """The same text where the verification computes all blocks again."""
    with monkeypatch.context() as patch:
        patch.setattr(buddy.policy, "exits", False)
        return buddy.generate(*args, **options)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with and without a sliding window
@every_kv_policy
@engines
def test_greedy_text_is_that_of_full_depth_and_of_the_slow_path(
    family, kv_policy, engine, monkeypatch
):
    buddy = exits_at_once(family, kv_policy=kv_policy, engine=engine)
    ids = random_ids(1, 7)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = buddy.generate(ids, **options)
    options["draft_budget"] = "3 blocks"
    assert torch.equal(buddy.generate(ids, **options), plain)
    assert torch.equal(slow_path(monkeypatch, buddy, ids, **options), plain)


@engines
@pytest.mark.parametrize("exit_", [3, 4, 5])
def test_sampled_text_is_that_of_the_slow_path(engine, exit_, monkeypatch):
    buddy = exits_at_once(engine=engine)
    ids = random_ids(1, 7)
    options = {"max_new_tokens": 24, "do_sample": True, "draft_budget": f"{exit_} blocks"}
    texts = []
    for seed in range(4):
        torch.manual_seed(seed)
        made = buddy.generate(ids, **options)
        torch.manual_seed(seed)
        assert torch.equal(made, slow_path(monkeypatch, buddy, ids, **options))
        texts.append(tuple(made[0].tolist()))
    assert len(set(texts)) == 4


def test_the_verification_runs_the_first_blocks_for_no_drafted_token_again():
    buddy = exits_at_once(engine="general")
    ids, calls = random_ids(1, 7), []
    original = buddy.backbone.run_block

    def counted(block, hidden, *rest):
        calls.append((block, hidden.shape[1]))
        return original(block, hidden, *rest)

    buddy.backbone.run_block = counted
    buddy.generate(ids, max_new_tokens=20, do_sample=False, draft_budget="3 blocks")
    decode = calls[NUM_BLOCKS:]  # after the prompt
    assert {tokens for block, tokens in decode if block < 3} == {1}
    assert max(tokens for block, tokens in decode if block >= 3) > 2


@every_kv_policy
@engines
@torch.no_grad()
def test_the_session_goes_on_as_the_reference_does(kv_policy, engine):
    buddy = exits_at_once(kv_policy=kv_policy, engine=engine)
    session = buddy.new_session(1, 32)
    text = buddy.generate(
        random_ids(1, 7),
        max_new_tokens=12,
        do_sample=False,
        draft_budget="3 blocks",
        cache=session,
    )
    (sequence,) = session.sequences.values()
    assert sequence.length == session.get_seq_length() == 18  # all but the last token were fed
    assert sequence.executed == 18 * NUM_BLOCKS
    assert sequence.block_mask.all()
    logits = buddy(text[:, -1:], cache=session, budget="4 blocks").logits[0, -1]
    runs = torch.ones(19, NUM_BLOCKS, dtype=torch.bool)
    runs[-1, 4:] = False
    hidden = naive_hidden(buddy.backbone, text[0], runs, kv_policy)
    # atol: the cache changes the order of sums.
    assert_close(logits, buddy.backbone.logits(hidden[-1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fails_at", [1, 3, 4, 5])
def test_a_draft_or_verification_that_fails_leaves_the_session_as_it_was(fails_at, monkeypatch):
    buddy = exits_at_once()
    session = buddy.new_session(1, 32)
    states, calls = [], []
    original = speculative.run_stretch

    def failing(*args, **options):
        states.append(session.state)
        calls.append(None)
        if len(calls) == fails_at:
            raise InterruptedError
        return original(*args, **options)

    monkeypatch.setattr(speculative, "run_stretch", failing)
    monkeypatch.setattr(speculative, "MOST_DRAFTED", 3)
    with pytest.raises(InterruptedError):
        buddy.generate(
            random_ids(1, 7),
            max_new_tokens=12,
            do_sample=False,
            draft_budget="3 blocks",
            cache=session,
        )
    # Three drafts, the last one's first blocks, the verification: none of them commits anything.
    assert all(state is session.state for state in states)
    assert [sequence.length for sequence in session.sequences.values()] == [7]


def test_other_policies_verify_by_all_blocks(monkeypatch):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:4,5")

    def refused(*args, **options):
        raise AssertionError("a static set is no exit that could be gone on from")

    monkeypatch.setattr(speculative, "run_stretch", refused)
    ids = random_ids(1, 7)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        buddy.generate(ids, draft_budget="4 blocks", **options), buddy.generate(ids, **options)
    )
