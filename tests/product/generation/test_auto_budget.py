"""`budget="auto"`: chosen from the prompt alone, then as if it had been named."""

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.budget.request import read_blocks
from buddy.engine.feed import Feed
from buddy.engine.run import run_once
from buddy.errors import BudgetError, PolicyError
from buddy.generation.budgets import read_summary
from tests.tiny import (
    every_family,
    padded,
    random_ids,
    random_predictor,
    random_router,
    tiny_buddy,
    tiny_model,
)

ROWS = [random_ids(1, n, seed=n)[0] for n in (4, 9, 6, 7, 3, 8)]
PLANNERS = [
    {},
    {"context": "key"},
    {"context": "key+value", "context_layer": 3},
    {"summary": "mean+last", "context_layer": 2},
    {"summary": "ema"},
    {"pool": "scores"},
]


def chosen(buddy, ids, mask=None, **options):
    with torch.no_grad():
        return buddy(ids, mask, budget="auto", **options).executed_blocks.tolist()


@pytest.mark.parametrize("planner", PLANNERS)
@every_family
def test_the_summary_is_what_the_router_sees(family, planner):
    buddy = tiny_buddy(family, **planner)
    ids, mask = padded(ROWS, "left")
    valid = mask.bool()
    seen = {}
    buddy.policy.scores = lambda state, blocks: (
        seen.update(summary=buddy.router.summary(state)),
        torch.zeros(len(blocks), buddy.num_blocks),
    )[1]
    with torch.no_grad():
        run_once(buddy.backbone, buddy.policy, Feed.of_batch(ids, valid), [(4,)] * 6)
    summary = read_summary(buddy.backbone, buddy.router, ids, valid, valid)
    # atol: the projection of a flat batch may sum in another order.
    torch.testing.assert_close(summary, seen["summary"], atol=1e-5, rtol=1e-5)
    assert summary.std(0).max() > 0.01, "the summary must depend on the prompt"


@pytest.mark.parametrize("planner", PLANNERS)
def test_auto_is_the_same_as_naming_what_was_chosen(planner):
    buddy = tiny_buddy(**planner)
    buddy.predictor = random_predictor(buddy.router, seed=11)
    ids, mask = padded(ROWS, "right")
    with torch.no_grad():
        auto = buddy(ids, mask, budget="auto")
        blocks = auto.executed_blocks.tolist()
        named = buddy(ids, mask, budget=[f"{n} blocks" for n in blocks])
    assert torch.equal(auto.logits, named.logits)
    assert auto.plan == named.plan
    assert len(set(blocks)) > 1
    made = buddy.generate(ids, attention_mask=mask, budget="auto", max_new_tokens=6)
    again = buddy.generate(ids, attention_mask=mask, budget=torch.tensor(blocks), max_new_tokens=6)
    assert torch.equal(made, again)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_chooses_as_each_row_alone_whatever_the_pads(side):
    buddy = tiny_buddy("mistral", predictor=True, context_layer=2)
    ids, mask = padded(ROWS, side)
    ids[mask == 0] = 7  # whatever stands in a pad
    alone = [chosen(buddy, row[None])[0] for row in ROWS]
    assert chosen(buddy, ids, mask) == alone
    assert len(set(alone)) > 1
    trace = DepthTrace()
    buddy.generate(ids, attention_mask=mask, budget="auto", max_new_tokens=3, trace=trace)
    assert [list(step.executed) for step in trace.steps] == [alone] * 3


def test_named_and_auto_rows_mix():
    buddy = tiny_buddy(predictor=True)
    ids = random_ids(6, 7)
    alone = chosen(buddy, ids)
    budgets = ["auto", 0.5, "auto", "6 blocks", 1.0, "auto"]
    with torch.no_grad():
        mixed = buddy(ids, budget=budgets).executed_blocks.tolist()
    assert mixed == [alone[0], 3, alone[2], 6, 6, alone[5]]


def test_the_continuation_never_changes_the_choice():
    buddy, prompt = tiny_buddy(predictor=True), random_ids(1, 6)
    alone, leaked = chosen(buddy, prompt), set()
    for seed in range(1, 12):
        ids = torch.cat([prompt, random_ids(1, 5, seed=seed)], 1)
        assert chosen(buddy, ids, prompt_mask=torch.arange(11)[None] < 6) == alone
        leaked.update(chosen(buddy, ids))
    assert len(leaked) > 1, "without the mask the continuation would have mattered"


def test_the_choice_holds_while_decoding_and_follows_its_row():
    buddy = tiny_buddy(predictor=True, summary="ema", ema_decay=0.3)
    ids = random_ids(6, 6)
    with torch.no_grad():
        out = buddy(ids, budget="auto")
        first = out.executed_blocks.tolist()
        afresh = set()
        for seed in range(4):
            token = random_ids(6, 1, seed=seed)
            ids = torch.cat([ids, token], 1)
            afresh.add(tuple(chosen(buddy, ids)))
            out = buddy(token, budget="auto", cache=out.cache)
            assert out.executed_blocks.tolist() == first
        assert afresh != {tuple(first)}, "a new choice would have been another"
        out.cache.reorder_cache(torch.tensor([2, 0, 1, 5, 4, 3]))
        out = buddy(token, budget="auto", cache=out.cache)
    assert out.executed_blocks.tolist() == [first[row] for row in (2, 0, 1, 5, 4, 3)]


def test_beams_share_their_prompts_choice():
    buddy, trace = tiny_buddy(predictor=True), DepthTrace()
    ids = random_ids(2, 6, seed=4)
    buddy.generate(ids, budget="auto", num_beams=3, max_new_tokens=4, trace=trace)
    first, second = chosen(buddy, ids)
    assert list(trace.steps[0].executed) in ([first] * 3 + [second] * 3, [first, second])
    assert list(trace.steps[-1].executed) == [first] * 3 + [second] * 3


def test_a_predictor_serves_other_policies_too():
    buddy = tiny_buddy(predictor=True)
    ids = random_ids(6, 7)
    routed = chosen(buddy, ids)
    buddy.set_policy("static:1,2,3")
    assert chosen(buddy, ids) == routed


def test_without_a_prompt_or_a_predictor_auto_is_refused():
    with pytest.raises(BudgetError, match="trained Budget Predictor"):
        tiny_buddy().generate(random_ids(1, 4), budget="auto", max_new_tokens=2)
    with pytest.raises(BudgetError, match="must be a fraction or a count of blocks"):
        read_blocks("auto")


def test_a_predictor_needs_the_router_that_it_was_made_for():
    model = tiny_model()
    router = random_router(model)
    with pytest.raises(PolicyError, match="give the router too"):
        BuddyForCausalLM(model, predictor=random_predictor(router))
    with pytest.raises(PolicyError, match="made for a router with"):
        BuddyForCausalLM(
            model, router=random_router(model, context="key"), predictor=random_predictor(router)
        )
