"""Budgets that are asked at every step: prompt and answer apart, and callables."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM, DepthTrace
from buddy.budget.request import Phases, read_blocks, read_budget
from buddy.budget.source import Progress
from buddy.engine.naive import naive_decode
from buddy.errors import BudgetError
from tests.tiny import (
    NUM_BLOCKS,
    every_family,
    every_kv_policy,
    random_ids,
    tiny_buddy,
    tiny_model,
)


@every_family
@every_kv_policy
@pytest.mark.parametrize("reroute", ["step", "prefill"])
@torch.no_grad()
def test_a_prompt_at_a_depth_of_its_own_equals_the_reference(family, kv_policy, reroute):
    buddy = tiny_buddy(family, kv_policy=kv_policy, summary="ema", ema_decay=0.6)
    ids = random_ids(1, 14)
    options = {"budget": "3 blocks", "prefill_budget": "5 blocks", "reroute": reroute}
    out = buddy(ids[:, :8], **options)
    logits, plans = [out.logits[0, -1]], [out.plan.mask[0]]
    for step in range(8, 14):
        out = buddy(ids[:, step : step + 1], cache=out.cache, **options)
        logits.append(out.logits[0, -1])
        plans.append(out.plan.mask[0])
    expected, expected_plans = naive_decode(
        buddy.backbone,
        buddy.policy,
        ids[0],
        8,
        blocks=3,
        prompt_blocks=5,
        kv_policy=kv_policy,
        reroute=reroute,
    )
    assert torch.equal(torch.stack(plans), expected_plans)
    assert torch.stack(plans).sum(1).tolist() == [5] + [3] * 6
    # atol: the cache and the batched projection change the order of sums.
    assert_close(torch.stack(logits), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1}])
def test_generate_spends_each_phase_as_asked(options):
    buddy = tiny_buddy()
    options = {"do_sample": False, **options}
    torch.manual_seed(options.pop("seed", 0))
    trace = DepthTrace()
    buddy.generate(
        random_ids(2, 6),
        budget=["3 blocks", "4 blocks"],
        prefill_budget=1.0,
        max_new_tokens=5,
        trace=trace,
        **options,
    )
    copies = options.get("num_beams", 1)
    assert trace.steps[0].executed == (NUM_BLOCKS,) * 2 * copies
    for step in trace.steps[1:]:
        assert step.executed == (3,) * copies + (4,) * copies
    assert trace.decode_blocks_per_token == 3.5


def test_a_callable_is_asked_at_every_step_and_told_what_ran():
    buddy = tiny_buddy()
    asked = []

    def budget(progress):
        asked.append(progress)
        return 1.0 if progress.is_prompt else ("3 blocks" if progress.tokens % 2 else 0.7)

    trace = DepthTrace()
    buddy.generate(random_ids(1, 6), budget=budget, max_new_tokens=6, do_sample=False, trace=trace)
    assert [step.executed for step in trace.steps] == [(6,), (4,), (3,), (4,), (3,), (4,)]
    spent = 6 * 6
    for at, (progress, blocks) in enumerate(zip(asked[1:], [4, 3, 4, 3, 4], strict=True)):
        assert progress == Progress(
            is_prompt=False,
            new_tokens=1,
            tokens=6 + at,
            executed=spent,
            num_blocks=NUM_BLOCKS,
            answer_tokens=at,
            answer_executed=spent - 6 * 6,
        )
        spent += blocks


def test_rows_of_one_batch_have_sources_of_their_own():
    buddy = tiny_buddy()
    ids = random_ids(3, 6)
    budgets = ["4 blocks", lambda progress: 0.5, 1.0]
    trace = DepthTrace()
    together = buddy.generate(ids, budget=budgets, max_new_tokens=5, do_sample=False, trace=trace)
    assert all(step.executed == (4, 3, 6) for step in trace.steps)
    for row, budget in enumerate(budgets):
        alone = buddy.generate(ids[row, None], budget=budget, max_new_tokens=5, do_sample=False)
        assert torch.equal(alone[0], together[row])


class Alternating:
    """A source of a user's own: a budget for each token of a pass."""

    def ask(self, progress):
        return [3 + (progress.tokens + at) % 3 for at in range(progress.new_tokens)]


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_source_may_name_a_budget_for_each_token(use_cache):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,2,3")
    with torch.no_grad():
        out = buddy(random_ids(2, 5), budget=Alternating(), use_cache=use_cache)
    assert out.lanes.executed.tolist() == [3, 4, 5, 3, 4] * 2


class Short:
    """Names too few."""

    def ask(self, progress):
        return [3]


class Says:
    """Names whatever it was made with."""

    def __init__(self, said):
        self.said = said

    def ask(self, progress):
        return self.said


def test_a_source_may_answer_in_numbers_of_numpy_and_torch():
    buddy = tiny_buddy()
    for said in (np.int64(4), torch.tensor(4)):
        assert buddy(random_ids(1, 5), budget=Says(said)).executed_blocks.tolist() == [4]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"prefill_budget": "auto", "budget": 0.5},
            "prefill_budget must be a fraction or a count",
        ),
        ({"prefill_budget": 7.0, "budget": 0.5}, "budget 7 is not allowed"),
        ({"prefill_budget": 1.0, "budget": "auto"}, "leave prefill_budget out"),
        (
            {"budget": lambda progress: "auto"},
            "a callable returns at a step must be a fraction",
        ),
        ({"budget": lambda progress: "much"}, "cannot be read"),
        ({"budget": Short()}, "names 1 budgets for 5 new tokens"),
        ({"budget": Says(2.5)}, "whole numbers of blocks, got 2.5"),
        ({"budget": Says(2)}, "2 blocks"),
        ({"budget": Says([3, 3, 3, 3, 99])}, "99 blocks"),
        ({"budget": [0.5, 0.6]}, "got 2 budgets for a batch of 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, says):
    buddy = tiny_buddy(predictor=True)
    with pytest.raises(BudgetError, match=says) as error:
        buddy(random_ids(1, 5), **options)
    assert "\n" not in str(error.value)


def test_phases_are_read_as_they_are_typed():
    assert read_budget("0.5") == read_blocks(0.5)
    for text, prompt, answer in (
        ("prefill:1.0,decode:0.5", 1.0, 0.5),
        (" prefill: 24 blocks , decode: 60% ", "24 blocks", 0.6),
    ):
        read = read_budget(text)
        assert read == Phases(prompt=read_blocks(prompt), answer=read_blocks(answer))
    for text in ("prefill:1.0", "decode:0.5,prefill:1.0", "prompt:1,decode:1"):
        with pytest.raises(BudgetError, match=r"write prompt:1\.0,answer:0\.5"):
            read_budget(text)
