"""A model with too few blocks to choose among runs at full depth, and at no other."""

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.errors import BudgetError, PolicyError
from tests.tiny import (
    NUM_BLOCKS,
    delete_blocks,
    every_kv_policy,
    padded,
    random_ids,
    random_router,
    tiny_model,
)

few = pytest.mark.parametrize("blocks", [1, 2])


def few_blocks(blocks, family="llama"):
    return delete_blocks(tiny_model(family), range(blocks, NUM_BLOCKS))


@few
@every_kv_policy
@pytest.mark.parametrize("policy", ["full", "random", "static", "static:0"])
@pytest.mark.parametrize("engine", ["auto", "general"])
@torch.no_grad()
def test_full_depth_is_transformers(blocks, kv_policy, policy, engine):
    model = few_blocks(blocks)
    options = {"policy": policy, "kv_policy": kv_policy, "engine": engine}
    buddy = BuddyForCausalLM(model, prior=torch.zeros(0), **options)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (7, 4)], "left")
    budgets = [1.0, f"{blocks} block"]
    theirs = model(ids, attention_mask=mask).logits
    ours = buddy(ids, mask, budget=budgets)
    real = mask.bool()
    assert_close(ours.logits[real], theirs[real], atol=2e-5, rtol=1e-5)  # atol: sum order
    assert ours.executed_blocks.tolist() == [blocks, blocks]
    decoding = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **decoding)
    assert torch.equal(buddy.generate(ids, budget=budgets, **decoding), expected)
    assert torch.equal(buddy.generate(ids, **decoding), expected)
    assert torch.equal(buddy.generate(ids, batch_route="shared", **decoding), expected)


@few
@pytest.mark.parametrize("policy", ["random", "static:0"])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_less_is_refused_in_one_line(blocks, policy, family):
    buddy = BuddyForCausalLM(few_blocks(blocks, family), policy=policy)
    for budget in (0.4, f"{blocks - 1} blocks", torch.tensor([blocks - 1])):
        with pytest.raises(BudgetError, match="full depth alone") as caught:
            buddy(random_ids(1, 4), budget=budget)
        assert "\n" not in str(caught.value)


@few
def test_a_router_has_nothing_to_choose(blocks):
    with pytest.raises(PolicyError, match=f"a model of {blocks} .* has none to choose"):
        random_router(few_blocks(blocks))


@few
def test_a_prior_of_other_blocks_is_refused(blocks):
    with pytest.raises(PolicyError, match=r"the prior has 1 entries .*: expected 0"):
        BuddyForCausalLM(few_blocks(blocks), prior=torch.zeros(1), policy="static")
