"""Cached decode under changing plans equals the reference that recomputes everything."""

import pytest
import torch
from torch.testing import assert_close

from buddy.engine.naive import naive_decode
from tests.tiny import (
    ALL_FAMILY_NAMES,
    every_kv_policy,
    padded,
    random_ids,
    some_families,
    tiny_buddy,
    with_kv_policies,
)

# atol: the cache, the gather and the batched projection change the order of sums.
TOLERANCE = {"atol": 5e-5, "rtol": 1e-4}


@torch.no_grad()
def decode(buddy, ids, mask, continuation, **options):
    """Logits and plans of prefill and of each fed token, as the engine makes them."""
    out = buddy(ids, mask, **options)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    logits, plans = [out.logits[torch.arange(len(ids)), last]], [out.plan.mask]
    for step in range(continuation.shape[1]):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = continuation[:, step : step + 1]
        out = buddy(new, mask, cache=out.cache, **options)
        logits.append(out.logits[:, 0])
        plans.append(out.plan.mask)
        assert out.executed_blocks.tolist() == out.plan.depth.tolist()
    return torch.stack(logits, 1), torch.stack(plans, 1), out.cache


@with_kv_policies(ALL_FAMILY_NAMES)
def test_decode_under_changing_plans(family, kv_policy):
    check_decode(family, kv_policy, "step")


@some_families
@every_kv_policy
@pytest.mark.parametrize("reroute", ["prefill", 3])
def test_decode_under_plans_that_change_less(family, kv_policy, reroute):
    check_decode(family, kv_policy, reroute)


def check_decode(family, kv_policy, reroute):
    buddy = tiny_buddy(family, kv_policy=kv_policy, summary="ema", ema_decay=0.6)
    prompt, continuation = random_ids(1, 8), random_ids(1, 8, seed=5)
    options = {"budget": "4 blocks", "reroute": reroute}
    logits, plans, _ = decode(buddy, prompt, torch.ones_like(prompt), continuation, **options)
    with torch.no_grad():
        expected, expected_plans = naive_decode(
            buddy.backbone,
            buddy.policy,
            torch.cat([prompt, continuation], 1)[0],
            8,
            blocks=4,
            kv_policy=kv_policy,
            reroute=reroute,
        )
    assert torch.equal(plans[0], expected_plans)
    assert_close(logits[0], expected, **TOLERANCE)
    if reroute == "step":
        assert len({tuple(plan.tolist()) for plan in plans[0]}) > 1


@pytest.mark.parametrize(
    "planner",
    [
        {"context": "key"},
        {"context": "key+value", "context_layer": 2},
        {"context_layer": 3},
        {"context_layer": 4},
        {"summary": "mean+last"},
        {"summary": "ema", "ema_decay": 0.7},
        {"pool": "scores"},
        {"pool": "scores", "summary": "ema", "ema_decay": 0.7},
    ],
)
def test_every_planner_setting(planner):
    buddy = tiny_buddy("qwen3", **planner)
    blocks = 5 if planner.get("context_layer", 1) == 4 else 4
    prompt, continuation = random_ids(1, 8), random_ids(1, 8, seed=5)
    logits, plans, _ = decode(
        buddy, prompt, torch.ones_like(prompt), continuation, budget=f"{blocks} blocks"
    )
    with torch.no_grad():
        expected, expected_plans = naive_decode(
            buddy.backbone,
            buddy.policy,
            torch.cat([prompt, continuation], 1)[0],
            8,
            blocks=blocks,
            kv_policy="lazy",
        )
    assert torch.equal(plans[0], expected_plans)
    assert_close(logits[0], expected, **TOLERANCE)
    if planner.get("summary") == "ema":
        assert len({tuple(plan.tolist()) for plan in plans[0]}) > 1


@with_kv_policies(ALL_FAMILY_NAMES)
def test_a_ragged_batch_of_mixed_budgets_equals_each_row_alone(family, kv_policy):
    check_ragged(family, kv_policy, "left")


@some_families
@every_kv_policy
def test_a_batch_that_is_padded_on_the_right_equals_each_row_alone(family, kv_policy):
    check_ragged(family, kv_policy, "right")


def check_ragged(family, kv_policy, side):
    buddy = tiny_buddy(family, kv_policy=kv_policy)
    rows = [random_ids(1, n, seed=160 + n)[0] for n in (4, 11, 7, 9)]
    budgets = [3, 5, 4, 6]
    ids, mask = padded(rows, side)
    continuation = random_ids(4, 6, seed=9)
    logits, plans, _ = decode(
        buddy, ids, mask, continuation, budget=[f"{b} blocks" for b in budgets]
    )
    assert len({tuple(plan) for plan in plans.flatten(0, 1).tolist()}) > 4
    for row, blocks in enumerate(budgets):
        with torch.no_grad():
            expected, expected_plans = naive_decode(
                buddy.backbone,
                buddy.policy,
                torch.cat([rows[row], continuation[row]]),
                len(rows[row]),
                blocks=blocks,
                kv_policy=kv_policy,
            )
        assert torch.equal(plans[row], expected_plans)
        assert_close(logits[row], expected, **TOLERANCE)


def test_the_kv_policies_really_differ():
    prompt, continuation = random_ids(1, 8), random_ids(1, 8, seed=5)
    results = {
        kv_policy: decode(
            tiny_buddy("llama", kv_policy=kv_policy, summary="ema", ema_decay=0.6),
            prompt,
            torch.ones_like(prompt),
            continuation,
            budget="3 blocks",
        )[0]
        for kv_policy in ("zero", "mask", "project", "lazy")
    }
    assert_close(results["lazy"], results["project"], **TOLERANCE)
    for other in ("zero", "mask"):
        assert not torch.allclose(results[other], results["project"], atol=1e-2)
    assert not torch.allclose(results["zero"], results["mask"], atol=1e-2)


def test_lazy_projects_nothing_while_the_route_is_stable():
    buddy = tiny_buddy("llama", kv_policy="lazy", summary="ema", ema_decay=0.6, engine="general")
    calls = []
    project = buddy.backbone.project
    buddy.backbone.project = lambda *args: calls.append(args[0]) or project(*args)
    prompt, continuation = random_ids(1, 8), random_ids(1, 8, seed=5)
    mask = torch.ones_like(prompt)
    decode(buddy, prompt, mask, continuation, budget="4 blocks", reroute="prefill")
    assert calls == []
    decode(buddy, prompt, mask, continuation, budget="4 blocks", reroute="step")
    assert calls != []
