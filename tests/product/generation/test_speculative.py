"""Drafted and verified, a text is the one that full depth writes."""

import math
import shutil
import threading

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
)

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import BudgetError, PolicyError
from buddy.generation import depth_drafts
from buddy.generation.speculative import _Writer
from tests.tiny import (
    FAMILY_NAMES,
    NUM_BLOCKS,
    random_ids,
    tiny_buddy,
    tiny_model,
    with_kv_policies,
)


@with_kv_policies(FAMILY_NAMES)
@pytest.mark.parametrize("engine", ["auto", "general"])
def test_greedy_output_is_that_of_full_depth(family, kv_policy, engine, long_drafts):
    buddy = tiny_buddy(family, kv_policy=kv_policy)
    buddy.executor.engine = engine
    ids = random_ids(1, 7)
    options = {"max_new_tokens": 14, "do_sample": False}
    plain = buddy.generate(ids, **options)
    drafted = buddy.generate(ids, draft_budget="3 blocks", **options)
    assert torch.equal(drafted, plain)


def test_processors_see_each_token_of_a_draft(long_drafts):
    buddy = tiny_buddy()
    ids = random_ids(1, 7)
    options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.7}
    plain = buddy.generate(ids, **options)
    assert not torch.equal(plain, buddy.generate(ids, max_new_tokens=24, do_sample=False))
    assert torch.equal(buddy.generate(ids, draft_budget="3 blocks", **options), plain)


class EveryThird(LogitsProcessor):
    """Its state is how often it was called: each third token is a 7."""

    def __init__(self):
        self.columns = []

    def __call__(self, input_ids, scores):
        self.columns.append(input_ids.shape[1])
        if len(self.columns) % 3:
            return scores
        return scores.index_fill(1, torch.tensor([7]), 1e3)


def test_a_processor_with_a_state_is_called_once_for_each_token(long_drafts):
    buddy, ids = tiny_buddy(), random_ids(1, 7)
    options = {"max_new_tokens": 12, "do_sample": False}
    first, second = EveryThird(), EveryThird()
    plain = buddy.generate(ids, logits_processor=[first], **options)
    drafted = buddy.generate(ids, logits_processor=[second], draft_budget="3 blocks", **options)
    assert torch.equal(drafted, plain)
    assert second.columns == first.columns == list(range(7, 19))


def test_a_drafted_text_has_the_watermark_of_a_plain_one(long_drafts):
    buddy, ids = tiny_buddy(), random_ids(1, 7, seed=2)
    mark = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    options = {"max_new_tokens": 16, "do_sample": False}
    plain = buddy.generate(ids, watermarking_config=mark, **options)
    assert not torch.equal(plain, buddy.generate(ids, **options))
    options["draft_budget"] = "3 blocks"
    assert torch.equal(buddy.generate(ids, watermarking_config=mark, **options), plain)


def test_a_processor_that_cannot_be_copied_is_refused_for_drafts():
    locked = EveryThird()
    locked.lock = threading.Lock()
    options = {"max_new_tokens": 3, "do_sample": False, "logits_processor": [locked]}
    with pytest.raises(PolicyError, match="one cannot be copied"):
        tiny_buddy().generate(random_ids(1, 7), draft_budget="3 blocks", **options)


def count_drafts(monkeypatch):
    """(tokens drafted, tokens kept) of each verification from now on."""
    counts, original = [], _Writer._keep

    def keep(self, fed, tokens, *rest):
        counts.append((fed.shape[1] - 1, tokens))
        original(self, fed, tokens, *rest)

    monkeypatch.setattr(_Writer, "_keep", keep)
    return counts


def drafts_rightly(policy="static:1,2,3", idle=range(1, NUM_BLOCKS - 1)):
    """A model whose skipped blocks add nothing, so that a draft is always right."""
    model = tiny_model("llama-mha")  # whose projections have no bias
    for block in idle:
        layer = model.model.layers[block]
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # no token is as good as another
    return BuddyForCausalLM(model, policy=policy)


def test_drafts_are_really_used(monkeypatch, long_drafts):
    buddy = drafts_rightly()
    counts = count_drafts(monkeypatch)
    ids = random_ids(1, 7)
    plain = buddy.generate(ids, max_new_tokens=30, do_sample=False)
    drafted = buddy.generate(ids, max_new_tokens=30, do_sample=False, draft_budget="3 blocks")
    assert torch.equal(drafted, plain)
    assert counts[:3] == [(8, 9)] * 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_are_of_the_first_words_and_text_of_all(monkeypatch, do_sample):
    monkeypatch.setattr(depth_drafts, "LEAST_CHANCE", 0.0)
    drafts, original = [], _Writer.verify

    def verify(self, text, drafted, proposed):
        drafts.extend(drafted.tolist())
        return original(self, text, drafted, proposed)

    monkeypatch.setattr(_Writer, "verify", verify)
    buddy, ids = tiny_buddy(), random_ids(1, 7)
    words = math.ceil(buddy.backbone.vocab * depth_drafts.DRAFTED_WORDS)
    options = {"max_new_tokens": 24, "do_sample": do_sample}
    torch.manual_seed(0)
    text = buddy.generate(ids, draft_budget="3 blocks", **options)[0, 7:]
    assert drafts
    assert max(drafts) < words <= int(text.max())
    if not do_sample:
        assert torch.equal(text, buddy.generate(ids, **options)[0, 7:])
    # Where only other words are allowed, drafts are wild, and the text is still as it should be.
    only = {**options, "suppress_tokens": list(range(words + 2)), "temperature": 0.01}
    text = buddy.generate(ids, draft_budget="3 blocks", **only)[0, 7:]
    assert int(text.min()) >= words + 2


def test_weights_of_few_bits_draft():
    buddy, ids = BuddyForCausalLM(tiny_model().half(), policy="static:1,2,3"), random_ids(1, 7)
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = buddy.generate(ids, **options)
    assert torch.equal(buddy.generate(ids, draft_budget="3 blocks", **options), plain)


def test_end_of_text_inside_a_draft_ends_the_text(long_drafts):
    buddy = tiny_buddy(policy="static:1,2,3")
    ids = random_ids(1, 7)
    plain = buddy.generate(ids, max_new_tokens=12, do_sample=False)
    end = int(plain[0, 7 + 6])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end}
    assert torch.equal(
        buddy.generate(ids, draft_budget="3 blocks", **options), buddy.generate(ids, **options)
    )


class EndsWith(StoppingCriteria):
    """A criterion of the caller's: the text ends with this token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **options):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize(
    "model", [{}, {"policy": "layerskip", "idle": range(3, NUM_BLOCKS)}], ids=["static", "exit"]
)
@pytest.mark.parametrize("is_sampled", [False, True])  # the likeliest token alone
@pytest.mark.parametrize("is_eos", [False, True])
def test_a_session_holds_what_was_returned_where_a_draft_goes_past_the_end(
    model, is_sampled, is_eos, monkeypatch, long_drafts
):
    buddy, ids = drafts_rightly(**model), random_ids(1, 5, seed=3)
    options = {"max_new_tokens": 20, "do_sample": False}
    if is_sampled:
        options |= {"do_sample": True, "top_k": 1}
    text = buddy.generate(ids, **options)[0].tolist()
    end = next(token for at, token in enumerate(text) if at > 6 and token not in text[:at])
    ending = {"eos_token_id": end} if is_eos else {"stopping_criteria": [EndsWith(end)]}
    counts, trace = count_drafts(monkeypatch), DepthTrace()
    made = []
    for drafts in ({}, {"draft_budget": "3 blocks", "trace": trace}):
        session = buddy.new_session(1, 32)
        made.append((buddy.generate(ids, cache=session, **options, **ending, **drafts), session))
    (plain, first), (drafted, second) = made
    assert counts[-1][0] == 8 > counts[-1][1]  # of a draft that was right
    assert torch.equal(drafted, plain)
    assert sum(step.fed for step in trace.steps) == second.get_seq_length()
    assert second.get_seq_length() == first.get_seq_length() == plain.shape[1] - 1
    lengths = [
        [sequence.length for sequence in each.sequences.values()] for each in (first, second)
    ]
    assert lengths[1] == lengths[0] == [plain.shape[1] - 1]
    more = torch.cat([plain, random_ids(1, 3)], 1)
    fresh = buddy(more).logits[:, -1]
    for session in (first, second):
        # atol: the cache changes the order of sums, and logits are 20 times as large.
        logits = buddy(more[:, session.get_seq_length() :], cache=session).logits[:, -1]
        assert_close(logits, fresh, atol=1e-3, rtol=1e-4)


def test_sampling_is_distributed_as_full_depth_draws():
    # One position, many draws: accepted or replaced, tokens follow the full distribution.
    torch.manual_seed(0)
    draft, full = torch.randn(1, 6), torch.randn(1, 6)
    writer = _Writer.__new__(_Writer)
    writer._sample = True
    drawn = torch.zeros(6)
    for token in torch.multinomial(draft.softmax(-1)[0], 20_000, replacement=True):
        drawn[writer._judge(token, draft, full)[0]] += 1
    # Five standard errors of a share of 20,000 draws.
    assert (drawn / 20_000 - full.softmax(-1)[0]).abs().max() < 5 * (0.25 / 20_000) ** 0.5


def test_what_cannot_be_drafted_for_is_refused():
    buddy = tiny_buddy()
    ids = random_ids(2, 5)
    for rows, options, words in (
        (ids[:1], {"draft_budget": "3 blocks", "budget": "3 blocks"}, "the answer's 3 of 6"),
        (ids[:1], {"draft_budget": "3 blocks", "budget": lambda _: 4}, "all run as many blocks"),
        (ids[:1], {"draft_budget": 1.0}, "must be below"),
        (ids[:1], {"draft_budget": "3 blocks", "num_beams": 2}, "greedy decoding and sampling"),
        (
            ids[:1],
            {"draft_budget": "3 blocks", "num_return_sequences": 2, "do_sample": True},
            "got do_sample",
        ),
    ):
        with pytest.raises(PolicyError, match=words):
            buddy.generate(rows, **{"max_new_tokens": 3, "do_sample": False, **options})
    with pytest.raises(BudgetError, match="draft_budget must be a fraction or a count"):
        buddy.generate(ids[:1], max_new_tokens=3, do_sample=False, draft_budget="auto")


@pytest.mark.parametrize(("sharpness", "drafted"), [(1, 1), (1e6, 8)])
def test_a_draft_ends_where_it_is_unsure(monkeypatch, sharpness, drafted):
    buddy = tiny_buddy("llama-mha", policy="static:1,2,3")
    with torch.no_grad():
        buddy.model.lm_head.weight.mul_(sharpness)
    counts = count_drafts(monkeypatch)
    buddy.generate(random_ids(1, 7), max_new_tokens=30, do_sample=False, draft_budget="3 blocks")
    assert counts[0][0] == drafted
