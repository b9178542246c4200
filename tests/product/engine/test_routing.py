"""What a route may depend on."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.errors import BudgetError, PolicyError, PromptError
from buddy.policies.static import StaticPolicy
from tests.tiny import (
    delete_blocks,
    padded,
    random_ids,
    random_router,
    tiny_buddy,
    tiny_model,
)


def plans(buddy, ids, mask=None, **options):
    with torch.no_grad():
        return buddy(ids, mask, budget="4 blocks", **options).plan.executed_sets


def test_different_prompts_get_different_plans():
    ids = random_ids(24, 6)
    assert len(set(plans(tiny_buddy("qwen3"), ids))) > 3


def test_the_continuation_never_changes_the_prompts_plan():
    buddy, prompt = tiny_buddy(), random_ids(1, 6)
    alone = plans(buddy, prompt)
    leaked = set()
    for seed in range(1, 12):
        ids = torch.cat([prompt, random_ids(1, 5, seed=seed)], 1)
        prompt_mask = torch.arange(11)[None] < 6
        assert plans(buddy, ids, prompt_mask=prompt_mask) == alone
        leaked.add(plans(buddy, ids))
    assert len(leaked) > 1, "without the mask the continuation would have mattered"


def test_the_continuation_is_routed_alike_with_and_without_a_cache():
    buddy, ids = tiny_buddy(), random_ids(2, 9)
    prompt_mask = torch.arange(9).expand(2, -1) < 5
    kept = buddy(ids, budget="4 blocks", prompt_mask=prompt_mask, use_cache=True)
    once = buddy(ids, budget="4 blocks", prompt_mask=prompt_mask, use_cache=False)
    assert once.cache is None
    assert once.plan.executed_sets == kept.plan.executed_sets
    torch.testing.assert_close(once.logits, kept.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_never_change_a_plan(side):
    buddy = tiny_buddy()
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 8, 5, 12)]
    ids, mask = padded(rows, side)
    ids[mask == 0] = 7  # whatever stands in a pad
    assert plans(buddy, ids, mask) == tuple(plans(buddy, row[None])[0] for row in rows)


def test_a_budget_that_changes_between_steps_changes_the_plan_even_without_rerouting():
    buddy, ids = tiny_buddy(), random_ids(1, 6)
    with torch.no_grad():
        out = buddy(ids, budget="4 blocks", reroute="prefill")
        for blocks in (5, 3, 6):
            out = buddy(
                ids[:, :1],
                budget=f"{blocks} blocks",
                reroute="prefill",
                cache=out.cache,
            )
            assert out.executed_blocks.tolist() == [blocks]


def test_a_row_whose_budget_stays_keeps_its_plan_under_reuse():
    buddy, ids = tiny_buddy("qwen3", summary="ema", ema_decay=0.3), random_ids(2, 6)
    with torch.no_grad():
        out = buddy(ids, budget="4 blocks", reroute="prefill")
        kept = out.plan.executed_sets[0]
        for seed in range(4):
            out = buddy(
                random_ids(2, 1, seed=seed),
                budget=["4 blocks", f"{3 + seed % 2 * 2} blocks"],
                reroute="prefill",
                cache=out.cache,
            )
            assert out.plan.executed_sets[0] == kept
            assert out.executed_blocks.tolist() == [4, 3 + seed % 2 * 2]


def test_a_refused_step_leaves_the_session_as_it_was():
    buddy, ids = tiny_buddy(context_layer=3), random_ids(1, 6)
    with torch.no_grad():
        session = buddy(ids, budget="4 blocks").cache
        with pytest.raises(BudgetError, match="4 of the 6 blocks always run"):
            buddy(ids[:, :1], budget="3 blocks", cache=session)
        assert session.get_seq_length() == 6


def test_a_prior_or_router_of_another_size_is_refused():
    model = tiny_model()
    for options in (
        {"prior": torch.arange(7.0)},
        {"router": random_router(delete_blocks(model, {1}))},
        {"policy": StaticPolicy([1], 9)},
    ):
        with pytest.raises(PolicyError, match="and the model has 6"):
            BuddyForCausalLM(model, **options)


def test_bad_requests_are_refused():
    buddy, ids = tiny_buddy(), random_ids(2, 6)
    with pytest.raises(BudgetError, match="3 budgets for a batch of 2"):
        buddy(ids, budget=[0.5, 0.6, 0.7])
    with pytest.raises(BudgetError, match="trained Budget Predictor"):
        buddy(ids, budget="auto")
    with pytest.raises(PolicyError, match="reroute"):
        buddy(ids, reroute=0)
    with pytest.raises(BudgetError, match="budget 4 is not allowed"):
        buddy(ids, budget=torch.tensor(4))
    with pytest.raises(PromptError, match="attention_mask has shape"):
        buddy(ids, torch.ones(2, 4, dtype=torch.long))
    with torch.no_grad():
        session = buddy(ids).cache
    with pytest.raises(PromptError, match="holds 2 rows and 1 came"):
        buddy(ids[:1], cache=session)
    with pytest.raises(PromptError, match="there are no new tokens"):
        buddy(ids[:, :0], cache=session)
    with pytest.raises(PromptError, match="calls every one a pad"):
        buddy(ids[:, :1], torch.tensor([[1] * 6 + [0]] * 2), cache=session)
    with torch.no_grad(), pytest.raises(PromptError, match="would have 66 tokens"):
        buddy(random_ids(2, 60), cache=session)
    with pytest.raises(PromptError, match="no tokens"):
        buddy(ids, torch.tensor([[0] * 6, [1] * 6]))
    with pytest.raises(PromptError, match="65 tokens, but the model's context holds 64"):
        buddy(random_ids(1, 65))
    for empty in (torch.zeros(1, 0, dtype=torch.long), None):
        with pytest.raises(PromptError, match=r"no (new )?tokens"):
            buddy.generate(empty, max_new_tokens=2)
    with pytest.raises(PromptError, match="context holds 64"):
        buddy.generate(random_ids(1, 65), max_new_tokens=2)
