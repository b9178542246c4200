"""`generate` is transformers' own, under a budget per row."""

import json

import pytest
import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import PolicyError
from tests.tiny import every_kv_policy, padded, random_ids, tiny_buddy, tiny_model

ROWS = [random_ids(1, n, seed=n)[0] for n in (4, 9, 6)]
BUDGETS = [0.5, "5 blocks", 1.0]


@every_kv_policy
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_mixed_budgets_generates_as_each_row_alone(side, kv_policy):
    buddy = tiny_buddy("mistral", kv_policy=kv_policy)
    ids, mask = padded(ROWS, side)
    out = buddy.generate(
        ids, attention_mask=mask, budget=BUDGETS, max_new_tokens=8, do_sample=False
    )
    assert torch.equal(out[:, : ids.shape[1]], ids)
    for row, prompt in enumerate(ROWS):
        alone = buddy.generate(prompt[None], budget=BUDGETS[row], max_new_tokens=8, do_sample=False)
        assert out[row, ids.shape[1] :].tolist() == alone[0, len(prompt) :].tolist()


def test_sampling_follows_the_seed():
    buddy = tiny_buddy()

    def sample(seed):
        torch.manual_seed(seed)
        return buddy.generate(
            ROWS[0][None],
            budget=0.5,
            do_sample=True,
            temperature=1.5,
            top_p=0.9,
            max_new_tokens=8,
            num_return_sequences=3,
        )

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert sample(1).shape == (3, 12)
    assert len({tuple(row.tolist()) for row in sample(1)}) > 1


@every_kv_policy
def test_beam_search_scores_what_a_fresh_pass_scores(kv_policy):
    buddy = tiny_buddy("llama", policy="static:1,3", kv_policy=kv_policy)
    prompt = ROWS[1][None]
    out = buddy.generate(
        prompt,
        budget="4 blocks",
        num_beams=3,
        do_sample=False,
        max_new_tokens=6,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        logprobs = buddy(out.sequences, budget="4 blocks").logits.log_softmax(-1)
    new = out.sequences[:, 9:]
    score = logprobs[:, 8:-1].gather(2, new[..., None]).sum()
    # atol: a sum of six logprobs from caches with another summation order.
    torch.testing.assert_close(out.sequences_scores[0], score, atol=1e-4, rtol=0)


def test_beam_search_with_a_router_runs_exactly_the_budget():
    trace = DepthTrace()
    tiny_buddy().generate(
        ROWS[1][None], budget="4 blocks", num_beams=3, max_new_tokens=6, trace=trace
    )
    assert {blocks for step in trace.steps for blocks in step.executed} == {4}
    assert len(trace.steps[1].executed) == 3


def test_a_trace_of_batches_of_several_sizes_says_so():
    buddy, trace = tiny_buddy(), DepthTrace()
    for rows in (1, 2):
        buddy.generate(random_ids(rows, 5), max_new_tokens=3, do_sample=False, trace=trace)
    assert len(trace.steps) == 6
    with pytest.raises(PolicyError, match="give each generation a DepthTrace"):
        trace.to_json()


def test_streamers_and_stopping_criteria_work():
    class Seen(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 7)

    streamer = Seen()
    out = tiny_buddy().generate(
        ROWS[0][None],
        budget=0.5,
        max_new_tokens=20,
        do_sample=False,
        streamer=streamer,
        stopping_criteria=[StopAt()],
    )
    assert out.shape == (1, 7)
    assert streamer.tokens == out[0].tolist()
    assert streamer.ended


def test_generation_ends_where_the_context_does():
    out = tiny_buddy().generate(random_ids(1, 60), budget=0.5, max_new_tokens=20)
    # 64 tokens can be fed; the one after them can still be predicted.
    assert out.shape == (1, 65)
    full = tiny_buddy().generate(random_ids(1, 64), budget=0.5, max_new_tokens=20)
    assert full.shape == (1, 65)


@pytest.mark.parametrize(
    "option",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 3},
        {"prompt_mask": torch.ones(1, 4)},
        {"output_hidden_states": True},
        {"generation_config": GenerationConfig(use_cache=False)},
    ],
)
def test_options_that_routing_gives_no_meaning_are_refused(option):
    with pytest.raises(PolicyError, match=f"no {next(iter(option))}|no use_cache"):
        tiny_buddy().generate(ROWS[0][None], budget=0.5, max_new_tokens=2, **option)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "wish",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_attentions": True, "output_hidden_states": True},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_what_makers_say_of_speed_keeps_nobody_from_generating(file, wish, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **wish}))
    model = BuddyForCausalLM.from_pretrained(tmp_path)
    made = model.generate(ROWS[0][None], max_new_tokens=3)
    expected = BuddyForCausalLM(tiny_model()).generate(ROWS[0][None], max_new_tokens=3)
    assert torch.equal(made, expected)
    with pytest.raises(PolicyError, match="no use_cache=False"):
        model.generate(ROWS[0][None], max_new_tokens=3, use_cache=False)


@pytest.mark.parametrize("option", ["output_hidden_states", "output_attentions"])
@torch.no_grad()
def test_hooks_give_what_is_refused_where_the_refusal_says(option):
    with pytest.raises(PolicyError) as caught:
        tiny_buddy().generate(ROWS[0][None], **{option: True})
    assert 'use hooks on the blocks with engine="general"' in str(caught.value)
    attention = "eager" if 'and attention="eager"' in str(caught.value) else "sdpa"
    assert attention == ("eager" if option == "output_attentions" else "sdpa")
    buddy = tiny_buddy(engine="general", attention=attention, summary="ema", ema_decay=0.5)
    fired, trace = [], DepthTrace()
    for index, block in enumerate(buddy.backbone.blocks):
        part = block if option == "output_hidden_states" else block.self_attn
        part.register_forward_hook(lambda _, __, out, at=index: fired.append((at, out)))
    buddy.generate(ROWS[0][None], budget=0.5, max_new_tokens=8, do_sample=False, trace=trace)
    assert len({step.plans[0] for step in trace.steps}) > 1
    assert [at for at, _ in fired] == [at for step in trace.steps for at in step.plans[0]]
    for _, out in fired:
        if option == "output_hidden_states":
            assert out.shape[-1] == buddy.config.hidden_size
        else:
            torch.testing.assert_close(out[1].sum(-1), torch.ones(out[1].shape[:-1]))


def test_pad_ids_are_taken_for_pads_as_transformers_does():
    ids, mask = padded(ROWS, "left")
    model = tiny_model()
    model.generation_config.eos_token_id = 1
    theirs = model.generate(ids, max_new_tokens=6, do_sample=False)
    buddy = BuddyForCausalLM(model)
    ours = buddy.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, theirs)
    with_mask = buddy.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, with_mask)


def test_a_huge_limit_allocates_no_more_than_the_context(monkeypatch):
    slots = []
    new_session = BuddyForCausalLM.new_session
    monkeypatch.setattr(
        BuddyForCausalLM,
        "new_session",
        lambda self, batch, n, kv: slots.append(n) or new_session(self, batch, n, kv),
    )
    tiny_buddy().generate(ROWS[0][None], budget=0.5, max_new_tokens=10**9)
    assert slots == [64]


def test_the_trace_tells_what_ran():
    trace = DepthTrace()
    buddy = tiny_buddy(summary="ema", ema_decay=0.5)
    buddy.generate(ROWS[1][None], budget="4 blocks", max_new_tokens=12, trace=trace)
    assert [step.tokens for step in trace.steps] == [9] + [1] * 11
    assert trace.blocks_per_token == 4
    assert trace.distinct_plans > 1
    record = trace.to_json()
    assert len(record["steps"]) == 12
    assert all(len(step["blocks"][0]) == 4 for step in record["steps"])


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValueError, match="buget"):
        tiny_buddy().generate(ROWS[0][None], buget=0.5, max_new_tokens=3)
