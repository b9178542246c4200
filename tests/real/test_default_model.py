"""The laws on the real default model; float32, so that a difference is a mistake."""

import json
from importlib.resources import files

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.engine.naive import naive_decode
from buddy.hub.presets import DEFAULT_MODEL
from buddy.hub.store import ensure_published
from tests.tiny import delete_blocks, random_router

pytestmark = pytest.mark.real

# atol: logits reach 30; sums over 576 to 49,152 numbers run in another order over a cache.
TOLERANCE = {"atol": 2e-3, "rtol": 1e-4}


@pytest.fixture(scope="module")
def buddy():
    return BuddyForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(buddy):
    return load_tokenizer(DEFAULT_MODEL)


def chat(tokenizer, *questions):
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        padding=True,
    )


def test_full_budget_is_transformers_in_prefill_32_decode_steps_and_text(buddy, tokenizer):
    inputs = chat(tokenizer, "Explain why the sky is blue.")
    options = {"max_new_tokens": 32, "do_sample": False}
    ids = buddy.model.generate(**inputs, **options)
    assert torch.equal(buddy.generate(**inputs, budget=1.0, **options), ids)
    prompt = inputs["input_ids"].shape[1]
    with torch.no_grad():
        theirs = buddy.model(ids[:, :prompt], use_cache=True)
        ours = buddy(ids[:, :prompt], budget=1.0)
        assert_close(ours.logits, theirs.logits, **TOLERANCE)
        for step in range(prompt, ids.shape[1]):
            new = ids[:, step : step + 1]
            theirs = buddy.model(new, cache=theirs.cache, use_cache=True)
            ours = buddy(new, budget=1.0, cache=ours.cache)
            assert_close(ours.logits, theirs.logits, **TOLERANCE)


def test_the_static_prior_at_three_quarters_is_the_model_with_eight_blocks_deleted(
    buddy, tokenizer
):
    ids = chat(tokenizer, "Name three fruits.")["input_ids"]
    removed = set(buddy.policy.removal_order[:8])
    with torch.no_grad():
        out = buddy(ids, budget=0.75)
        theirs = delete_blocks(buddy.model, removed)(ids).logits
    assert out.executed_blocks.tolist() == [22]
    assert set(range(30)) - set(out.plan.executed_sets[0]) == removed
    assert_close(out.logits, theirs, **TOLERANCE)


@pytest.mark.parametrize("kv_policy", ["zero", "mask", "project", "lazy"])
def test_decode_under_changing_plans_is_the_naive_reference(buddy, tokenizer, kv_policy):
    router = random_router(buddy.model, summary="ema", ema_decay=0.6)
    routed = BuddyForCausalLM(buddy.model, router=router, kv_policy=kv_policy)
    ids = tokenizer("Depth routing runs some blocks of a model and skips the others.")
    ids = torch.tensor(ids["input_ids"])
    prompt = 6
    with torch.no_grad():
        expected, plans = naive_decode(
            routed.backbone, routed.policy, ids, prompt, blocks=15, kv_policy=kv_policy
        )
        out = routed(ids[None, :prompt], budget=0.5)
        for step in range(len(expected)):
            assert torch.equal(out.plan.mask[0], plans[step])
            assert out.executed_blocks.tolist() == [15]
            assert_close(out.logits[0, -1], expected[step], **TOLERANCE)
            if step < len(expected) - 1:
                new = ids[None, prompt + step : prompt + step + 1]
                out = routed(new, budget=0.5, cache=out.cache)
    assert len({tuple(plan.tolist()) for plan in plans}) > 3


def test_a_batch_of_mixed_budgets_generates_as_each_row_alone(buddy, tokenizer):
    questions = ["Why is the sky blue?", "Hi!", "What is the capital of France, and of Spain?"]
    budgets = [0.9, "28 blocks", 1.0]
    inputs = chat(tokenizer, *questions)
    width = inputs["input_ids"].shape[1]
    out = buddy.generate(**inputs, budget=budgets, max_new_tokens=12, do_sample=False)
    for row, question in enumerate(questions):
        one = chat(tokenizer, question)
        alone = buddy.generate(**one, budget=budgets[row], max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(alone[0, one["input_ids"].shape[1] :], skip_special_tokens=True)
        assert tokenizer.decode(out[row, width:], skip_special_tokens=True) == text


def test_the_config_that_ships_is_that_of_the_model(buddy):
    def read(folder):
        values = json.loads((folder / "config.json").read_text())
        return {name: value for name, value in values.items() if name != "transformers_version"}

    shipped = files("buddy.hub") / "configs" / "smollm2-135m"
    assert read(shipped) == read(ensure_published())
