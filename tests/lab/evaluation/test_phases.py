"""Conditions in which prompt and answer have budgets of their own, and online policies."""

from fractions import Fraction

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.budget.source import ConstantBudget, PhasedBudget
from buddy.data.examples import Example
from buddy.errors import BudgetError
from buddy.lab.evaluation.against import Against
from buddy.lab.evaluation.answers.answers import run_answers
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.samples import SampleLog
from buddy.records import RunRecord
from tests.product.engine.test_steering import ByNorm
from tests.product.routing.test_ledger import ledger
from tests.tiny import NUM_BLOCKS, tiny_buddy, tiny_model

POLICY = ("static:1,2,3,4",)


def test_phases_make_conditions_of_their_own():
    model = tiny_buddy()
    budgets = ("1.0", "0.5", "prefill:1.0,decode:0.5", "prefill:0.5,decode:1.0")
    full, plain, phased, other = plan_conditions(model, POLICY, budgets)
    assert plain.source == ConstantBudget(3)
    assert phased.source == PhasedBudget(NUM_BLOCKS, ConstantBudget(3))
    assert phased.budgets(2, (7, 8, 9)) == (6, 6, 3, 3, 3)
    assert plain.budgets(2, (7, 8, 9)) == (3,)
    assert phased.describe()["prefill_blocks"] == NUM_BLOCKS
    assert "prefill_blocks" not in plain.describe()
    assert phased.label != plain.label
    assert len({item.key for item in (full, plain, phased, other)}) == 4
    assert (other.blocks, other.budget.prefill) == (NUM_BLOCKS, 3)


def test_a_source_of_its_own_is_asked_for_the_answer_and_names_its_samples():
    model, told = tiny_buddy(), []

    def source(progress):
        told.append((progress.new_tokens, progress.token_ids, progress.is_prompt))
        return "4 blocks"

    own, other, plain = plan_conditions(
        model, POLICY, (source, lambda progress: "5 blocks", "4 blocks")
    )
    assert own.budgets(2, (7, 8, 9)) == (6, 6, 4, 4, 4)
    assert told == [(3, (7, 8, 9), False)]
    assert other.budgets(1, (7,)) == (6, 5)
    assert own.is_free
    assert len({own.key, other.key, plain.key}) == 3


def test_samples_are_named_by_what_ran_and_not_by_the_file_that_said_so(tmp_path):
    model, path = tiny_buddy(predictor=True), tmp_path / "order.json"
    budgets = ("prefill:1.0,decode:0.5", "0.5", "auto")

    def keys(order):
        made = RunRecord(kind="x", config={}, results={"removal_order": order}, model=None)
        made.save(path)
        found = plan_conditions(model, (f"static:{path}",), budgets, auto=True)
        return [result.key for result in found]

    first, again = keys([1, 2, 3, 4]), keys([4, 3, 2, 1])
    assert len({*first, *again}) == 6
    assert keys([1, 2, 3, 4]) == first


def test_so_are_samples_under_a_mean(tmp_path):
    model, path = with_ledger(), tmp_path / "order.json"

    def keys(order):
        made = RunRecord(kind="x", config={}, results={"removal_order": order}, model=None)
        made.save(path)
        budgets = ("mean:0.75", "mean:0.7", "prefill:1.0,decode:mean:0.75")
        found = plan_conditions(model, (f"static:{path}",), budgets, means=True)
        return [result.key for result in found]

    first, again = keys([1, 2, 3, 4]), keys([4, 3, 2, 1])
    assert len({*first, *again}) == 6
    assert keys([1, 2, 3, 4]) == first


def test_phases_that_are_equal_are_one_budget():
    [condition] = plan_conditions(tiny_buddy(), POLICY, ("0.5", "prefill:3 blocks,decode:0.5"))
    assert condition.budget.prefill is None


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("prefill:1.0", "write prompt:1.0,answer:0.5"),
        ("prefill:auto,decode:0.5", "must be a fraction or a count"),
        ("prefill:2,decode:0.5", "budget 2 is not allowed"),
        ("prefill:1.0,decode:auto", "name both as numbers"),
    ],
)
def test_phases_that_cannot_be_are_refused(budget, says):
    with pytest.raises(BudgetError, match=says):
        plan_conditions(tiny_buddy(predictor=True), POLICY, (budget,), auto=True)


def with_ledger():
    model = tiny_buddy()
    model.ledger = ledger((3, 4, 6), [1.05, 1.02, 1.0], {7: [2.0, 1.0, 0.0]}, [0.1, 0.1, 0.1])
    return model


def test_a_mean_is_spent_over_the_tokens_after_the_prompt():
    model = with_ledger()
    budgets = ("mean:0.75", "mean:0.9", "prefill:1.0,decode:mean:0.75", "4 blocks")
    mean, more, phased, plain = plan_conditions(model, POLICY, budgets, means=True)
    answer = (1, 1, 1, 7, 1, 7)
    # With 3 blocks saved of a mean of 4.5, a block costs 0.1 exp(-2 * 3 / 4.5) = 0.026 nats.
    assert mean.budgets(2, answer) == (4, 4, 3, 3, 4, 6, 3, 6)
    assert phased.budgets(2, answer) == (6, 6, 3, 3, 4, 6, 3, 6)
    assert more.budgets(2, answer)[:2] == (5, 5)
    assert len({item.key for item in (mean, more, phased, plain)}) == 4
    assert mean.fixed_blocks() is None
    assert mean.describe()["budget"] == "mean:0.75"
    assert phased.source.answer.mean == phased.budget.mean == Fraction(9, 2)


@torch.no_grad()
def test_answers_under_a_mean_lose_what_the_same_depths_lose_token_by_token():
    model, ids = with_ledger(), torch.tensor([5, 2, 1, 1, 7, 7, 1, 7, 3])
    example = Example(tuple(ids[:2].tolist()), tuple(ids[2:].tolist()), "any")
    (condition,) = plan_conditions(model, POLICY, ("mean:0.75", "mean:0.75"), means=True)
    point, *_ = run_answers(model, [condition], [example])["points"]
    model.set_policy(POLICY[0])
    session = model.new_session(1, 16)
    lost, ran, column = 0.0, [], 0
    for fed in (ids[:2], *ids[2:-1].split(1)):
        out = model(fed[None], budget="mean:0.75", cache=session)
        column += len(fed)
        lost -= float(out.logits[0, -1].log_softmax(-1)[ids[column]])
        ran += [len(out.plan.executed_sets[0])]
    assert point["value"] == pytest.approx(lost / 7, rel=1e-4)
    assert len(set(ran)) > 1
    assert point["mean_blocks"] == pytest.approx((2 * ran[0] + sum(ran[1:])) / 8)


def test_the_mean_beside_a_prompt_of_its_own_is_the_answers_alone(tmp_path):
    model = with_ledger()
    example = Example((5, 2, 1), (1, 7, 7, 1, 7), "any")
    (phased,) = plan_conditions(model, POLICY, ("prefill:1.0,decode:mean:0.75",), means=True)
    spent = phased.source.answer.levels(example.answer[:-1])
    with SampleLog(tmp_path / "log", {}) as log:
        log.declare(phased.describe() | {"key": phased.key})
        found = run_answers(model, [phased], [example], log=log)
    assert found["points"][0]["mean_blocks"] == sum(spent) / 4
    against = Against(tmp_path / "log")
    difference, *_ = run_answers(model, [phased], [example], against=against)["against"]
    assert difference["mean_blocks"] == sum(spent) / 4


def test_a_mean_needs_a_ledger():
    with pytest.raises(BudgetError, match="needs a ledger"):
        plan_conditions(tiny_buddy(), POLICY, ("mean:0.5",), means=True)
    with pytest.raises(BudgetError, match="measure it by buddy eval answers"):
        plan_conditions(with_ledger(), POLICY, ("mean:0.75",))


def test_an_online_policy_is_measured_as_it_is_and_at_no_budget():
    model = BuddyForCausalLM(tiny_model(), policy=ByNorm((1, 2)))
    (condition,) = plan_conditions(model, (), ("1.0",))
    assert condition.policy is model.policy
    assert condition.fixed_blocks() is None
    assert condition.spent(3.4) == {"blocks": 3, "mean_blocks": 3.4}
    with pytest.raises(BudgetError, match="decides while it runs and keeps no budget"):
        plan_conditions(model, (), ("4 blocks",))
