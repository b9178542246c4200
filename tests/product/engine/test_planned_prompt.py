"""Prompts that are fed in parts, or begin as another did, beside sequences that decode."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from buddy.budget.source import ConstantBudget
from buddy.engine.feed import Feed
from buddy.engine.naive import naive_hidden
from buddy.engine.planned_prompt import plan_prompt
from buddy.engine.run import run_step
from buddy.engine.step import Step
from buddy.errors import PolicyError, PromptError
from tests.tiny import every_kv_policy, random_ids, tiny_buddy

POLICIES = ("routed", "random:3", "static:2,3,4,1", "full")


def bench(policy, kv_policy="lazy"):
    buddy = tiny_buddy(policy=policy, kv_policy=kv_policy)
    with torch.no_grad():
        return buddy, buddy.inference_policy()


def budget_of(policy, blocks):
    return ConstantBudget(6 if policy.name == "full" else blocks)


class Run:
    """A session that is fed step by step; what each sequence was fed and ran."""

    def __init__(self, policy, kv_policy="lazy", executor=False):
        self.buddy, self.policy = bench(policy, kv_policy)
        self.executor = self.buddy.executor.fast_path() if executor else None
        self.session = self.buddy.new_session(1, 4, kv_policy)
        self.fed = {}

    @torch.no_grad()
    def feed(self, parts, planned=None, **options):
        """Feeds {number: ids}; the output."""
        prompts = tuple(n in planned for n in parts) if planned else None
        out = run_step(
            self.buddy.backbone,
            self.policy,
            self.session,
            Step(
                sequence_ids=list(parts),
                feed=Feed(
                    token_ids=torch.cat(list(parts.values())),
                    counts=tuple(map(len, parts.values())),
                    prompts=prompts,
                ),
                planned_prompts=planned,
                **options,
            ),
            executor=self.executor,
        )
        rows = np.split(out.plan.host, np.cumsum(out.lanes.counts)[:-1])
        for (number, ids), runs in zip(parts.items(), rows, strict=True):
            self.fed.setdefault(number, []).extend(zip(ids.tolist(), runs.tolist(), strict=True))
        assert out.executed.tolist() == out.plan.depth.tolist()
        return out

    def expected(self, number):
        ids, runs = zip(*self.fed[number], strict=True)
        kv_policy = self.session.kv.kv_policy
        return naive_hidden(self.buddy.backbone, torch.tensor(ids), torch.tensor(runs), kv_policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("executor", [False, True])
def test_a_prompt_in_parts_is_the_prompt_in_one(policy, executor):
    ids, others = random_ids(1, 13)[0], random_ids(3, 13, seed=5)
    whole = Run(policy)
    first_id = whole.session.join(budget_of(whole.policy, 4))
    first = whole.feed({first_id: ids})
    after = [whole.feed({first_id: others[0, at : at + 1]}) for at in range(3)]
    for size in (1, 5, 13):
        run = Run(policy, executor=executor)
        beside = run.session.join(budget_of(run.policy, 3))
        run.feed({beside: others[1, :4]})
        number = run.session.join(budget_of(run.policy, 4))
        planned = plan_prompt(run.policy, ids, budget_of(run.policy, 4).each)
        assert np.array_equal(planned.block_mask, first.plan.host[0])
        for at, part in enumerate(ids.split(size)):
            parts = {beside: others[2, at % 13][None], number: part}
            out = run.feed(parts, {number: planned})
        assert_close(out.hidden[-1], first.hidden[-1], atol=1e-5, rtol=1e-5)
        for at, step in enumerate(after):
            out = run.feed({number: others[0, at : at + 1]})
            assert np.array_equal(out.plan.host, step.plan.host), "the route goes on as it would"
            assert_close(out.hidden, step.hidden, atol=1e-5, rtol=1e-5)
        assert_close(out.hidden[-1], run.expected(number)[-1], atol=1e-5, rtol=1e-5)
        last = run.feed({beside: others[2, :1]})
        assert_close(last.hidden[-1], run.expected(beside)[-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("executor", [False, True])
@every_kv_policy
def test_a_sequence_goes_on_from_anothers_beginning(kv_policy, executor):
    ids = random_ids(1, 12)[0]
    run = Run("random:1", kv_policy, executor)
    source = ConstantBudget(4)
    filler = run.session.join(source)
    run.feed({filler: random_ids(1, 9, seed=8)[0]})
    first = run.session.join(source)
    planned = plan_prompt(run.policy, ids, 4)
    run.feed({first: ids[:9]}, {first: planned})
    run.feed({first: ids[9:]}, {first: planned})
    for step in range(3):  # other plans, so that holes are filled before and after the copy
        run.feed({first: random_ids(1, 1, seed=step)[0]})
    run.session.leave(filler)  # its row, which is not clean, is taken
    grown = [run.session.branch(first, 7, source), run.session.branch(first, 12, source)]
    run.fed |= {n: list(run.fed[first][:k]) for n, k in zip(grown, (7, 12), strict=True)}
    for step in range(4):
        parts = {n: random_ids(1, 1 + step, seed=step + n)[0] for n in (first, *grown)}
        out = run.feed(parts)
        for number, hidden in zip(parts, out.hidden.split(out.lanes.counts), strict=True):
            expected = run.expected(number)[-len(hidden) :]
            assert_close(hidden, expected, atol=2e-5, rtol=1e-5)
        if step == 1:
            run.session.leave(first)  # what the two share stays theirs
            run.fed.pop(first)
            first = run.session.join(source)


def test_a_sequence_cannot_begin_with_more_than_there_is():
    run = Run("full")
    number = run.session.join()
    run.feed({number: random_ids(1, 3)[0]})
    before = run.session.state
    with pytest.raises(PromptError, match="cannot give its first 4"):
        run.session.branch(number, 4, ConstantBudget(6))
    assert run.session.state is before


@torch.no_grad()
def test_who_is_routed_apart_has_neither_say_nor_ear():
    ids = random_ids(4, 6)
    token = random_ids(4, 1, seed=9)
    depths = (3, 4, 5, 4)

    def plans(rows, apart, batch_route="shared"):
        run = Run("routed")
        numbers = [run.session.join(ConstantBudget(depths[row])) for row in rows]
        for number, row in zip(numbers, rows, strict=True):
            run.feed({number: ids[row]})
        out = run.feed(
            {n: token[row] for n, row in zip(numbers, rows, strict=True)},
            routed_alone=[n for n, row in zip(numbers, rows, strict=True) if row in apart],
            batch_route=batch_route,
        )
        return dict(zip(rows, out.plan.executed_sets, strict=True))

    alone = {row: plans([row], ())[row] for row in range(4)}
    shared = plans([0, 1, 2, 3], ())
    assert shared != alone, "else nothing is tested"
    mixed = plans([0, 1, 2, 3], (1, 3))
    assert mixed[1] == alone[1]
    assert mixed[3] == alone[3]
    pair = plans([0, 2], ())
    assert {row: mixed[row] for row in (0, 2)} == pair
    assert plans([0, 1, 2, 3], (0, 1, 2, 3)) == alone
    assert plans([0, 1, 2, 3], (0, 1, 2)) == alone, "one that is left has no company"


@torch.no_grad()
def test_tokens_with_budgets_of_their_own_are_routed_apart_too():
    class Rising:
        def ask(self, progress):
            return [3 + at % 3 for at in range(progress.new_tokens)]

    ids = random_ids(3, 6)
    run = Run("routed")
    numbers = [run.session.join(Rising()) for _ in range(3)]
    out = run.feed(
        dict(zip(numbers, ids, strict=True)), batch_route="shared", routed_alone=numbers[1:2]
    )
    lone = Run("routed")
    number = lone.session.join(Rising())
    assert lone.feed({number: ids[1]}).plan.executed_sets == out.plan.executed_sets[6:12]


def test_a_plan_that_needs_blocks_is_refused():
    buddy = tiny_buddy()
    assert not buddy.policy.plans_ahead
    with pytest.raises(PolicyError, match="in one pass"):
        plan_prompt(buddy.policy, random_ids(1, 3)[0], 4)
