"""An exit at a block: the first n blocks, whatever the cache, the engine or the way it is asked."""

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.engine.naive import naive_decode
from buddy.errors import BudgetError
from buddy.lab.evaluation.conditions import plan_conditions
from tests.tiny import (
    NUM_BLOCKS,
    delete_blocks,
    every_kv_policy,
    random_ids,
    tiny_model,
)
from tests.words import word_tokenizer

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # the cache changes the order of sums


@pytest.mark.parametrize("blocks", [3, 4, 5, 6])
@torch.no_grad()
def test_a_budget_is_an_exit(blocks):
    model = tiny_model("qwen3")
    buddy = BuddyForCausalLM(model, policy="layerskip")
    ids = random_ids(2, 7)
    out = buddy(ids, budget=f"{blocks} blocks")
    assert out.plan.executed_sets == (tuple(range(blocks)),) * 2
    cut = delete_blocks(model, set(range(blocks, NUM_BLOCKS)))
    assert_close(out.logits, cut(ids).logits, **TOLERANCE)


@torch.no_grad()
def test_full_depth_is_the_model_bit_for_bit():
    model = tiny_model()
    ids = random_ids(2, 7)
    buddy = BuddyForCausalLM(model, policy="layerskip", engine="general")
    assert torch.equal(buddy(ids).logits, model(ids).logits)


@every_kv_policy
@pytest.mark.parametrize("engine", ["auto", "general"])
@torch.no_grad()
def test_cached_decode_equals_the_reference(kv_policy, engine):
    buddy = BuddyForCausalLM(tiny_model(), policy="layerskip", kv_policy=kv_policy, engine=engine)
    ids = random_ids(1, 11)
    out = buddy(ids[:, :6], budget="6 blocks")
    found = [out.logits[0, -1]]
    for step in range(6, 11):
        out = buddy(ids[:, step : step + 1], cache=out.cache, budget="4 blocks")
        found.append(out.logits[0, -1])
    expected, _ = naive_decode(
        buddy.backbone, buddy.policy, ids[0], 6, blocks=4, kv_policy=kv_policy, prompt_blocks=6
    )
    assert_close(torch.stack(found), expected, **TOLERANCE)


@torch.no_grad()
def test_rows_of_a_batch_leave_at_exits_of_their_own():
    buddy = BuddyForCausalLM(tiny_model(), policy="layerskip")
    ids = random_ids(3, 6)
    options = {"max_new_tokens": 6, "do_sample": False}
    budgets = ["3 blocks", "5 blocks", "6 blocks"]
    made = buddy.generate(ids, budget=budgets, **options)
    for row, budget in enumerate(budgets):
        alone = buddy.generate(ids[row : row + 1], budget=budget, **options)
        assert torch.equal(made[row : row + 1], alone)


def test_an_evaluation_shares_samples_of_one_exit():
    buddy = BuddyForCausalLM(tiny_model(), policy="layerskip")
    (condition,) = plan_conditions(buddy, budgets=["4 blocks"])
    assert condition.fixed_blocks() == (0, 1, 2, 3)
    assert condition.key == "blocks:0,1,2,3"


def test_a_budget_above_the_model_is_refused():
    buddy = BuddyForCausalLM(tiny_model(), policy="layerskip")
    with pytest.raises(BudgetError, match="3 to 6 blocks"):
        buddy(random_ids(1, 4), budget="7 blocks")


def test_a_checkpoint_keeps_the_policy(tmp_path):
    buddy = BuddyForCausalLM(tiny_model(), policy="layerskip")
    buddy.save_pretrained(tmp_path / "made", tokenizer=word_tokenizer())
    again = BuddyForCausalLM.from_pretrained(tmp_path / "made")
    assert again.policy.describe() == "early exit"
    ids = random_ids(1, 5)
    with torch.no_grad():
        found, expected = (one(ids, budget="4 blocks").logits for one in (again, buddy))
    assert torch.equal(found, expected)
