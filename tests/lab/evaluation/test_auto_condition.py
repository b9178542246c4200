"""`auto` as a condition: each question's own budget, and what was spent on each task."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance

from buddy.budget.source import ConstantBudget
from buddy.errors import BudgetError
from buddy.lab.evaluation.against import Against
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.samples import SampleLog
from buddy.lab.evaluation.tasks.loading import load_tasks
from buddy.lab.evaluation.tasks.scoring import ask, score
from buddy.lab.evaluation.tasks.tasks import run_tasks
from tests.lab.evaluation.test_harness import data, harness, words  # noqa: F401
from tests.tiny import random_ids, tiny_buddy


@pytest.fixture
def model():
    return tiny_buddy(predictor=True)


def question(seed):
    ids = random_ids(1, 9, seed=seed)[0].tolist()
    return ask([(ids[:6], ids[6:7]), (ids[:6], ids[6:9])], context=64)[0]


def test_each_question_is_scored_at_the_budget_chosen_from_its_context(model):
    questions = [question(seed) for seed in range(8)]
    found = score(model, model.policy, None, questions)
    depths = []
    for result, scored in zip(questions, found, strict=True):
        chosen = model(torch.tensor([result.routed]), budget="auto").executed_blocks.item()
        [named] = score(model, model.policy, ConstantBudget(chosen), [result])
        assert scored.blocks == named.blocks
        # atol: a batch of eight sums in another order.
        assert scored.loglikelihoods == pytest.approx(named.loglikelihoods, abs=1e-4)
        depths.append(chosen)
    assert len(set(depths)) > 1


def test_points_say_what_was_spent(model, data):  # noqa: F811
    loaded = load_tasks(["piqa"], data_dir=data)
    conditions = plan_conditions(
        model, ["routed", "mine=static:2,3,1"], ["auto", "4 blocks"], auto=True
    )
    keys = [condition.key for condition in conditions]
    assert (keys[0], *keys[2:]) == ("routed@auto", "routed@4", "blocks:0,1,4,5")
    assert keys[1].startswith("auto:")  # of the set at each depth, not of the order's name
    out = run_tasks(harness(model, batch_size=3), conditions, loaded)
    points = {(point["label"], point["metric"]): point for point in out["points"]}
    plans = next(entry for entry in out["execution"] if entry["label"] == "routed auto")
    point = points["routed auto", "acc"]
    assert point["mean_blocks"] == pytest.approx(sum(plans["rates"]))
    assert point["blocks"] == plans["blocks"] == round(point["mean_blocks"])
    assert 3 < point["mean_blocks"] < 6, "the choice must vary"
    assert point["budget"] == "auto"
    # Whoever chooses the blocks, the predictor chooses how many.
    assert points["mine auto", "acc"]["mean_blocks"] == pytest.approx(point["mean_blocks"])
    assert points["routed", "acc"]["blocks"] == 4
    assert "mean_blocks" not in points["routed", "acc"]
    json.dumps(out, allow_nan=False)


def test_a_difference_says_the_depth_that_its_points_say(model, data, tmp_path):  # noqa: F811
    loaded = load_tasks(["piqa"], data_dir=data)
    conditions = plan_conditions(model, ["routed"], ["auto"], auto=True)
    with SampleLog(tmp_path / "log", {}) as log:
        log.declare(conditions[0].describe() | {"key": conditions[0].key})
        lm = harness(model, batch_size=3, log=log)
        points = run_tasks(lm, conditions, loaded)["points"]
    lm = harness(model, batch_size=3)
    found = run_tasks(lm, conditions, loaded, against=Against(tmp_path / "log"))["against"]
    (depth,) = {point["mean_blocks"] for point in points}
    assert {(gap["mean_blocks"], gap["blocks"]) for gap in found} == {(depth, round(depth))}


def test_generation_too(model):
    lm = harness(model, budget="auto")
    prompts = [words(6, seed) for seed in range(4)]
    made = []
    for prompt in prompts:
        request = Instance(
            "generate_until", {}, (prompt, {"until": ["nothing"], "max_gen_toks": 3}), 0
        )
        lm.generate_until([request])
        ids = lm.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        made.append(model(ids, budget="auto").executed_blocks.item())
    assert [len(blocks) for blocks in next(iter(lm.execution.values()))] == made
    assert len(set(made)) > 1


def test_where_there_are_no_prompts_auto_is_refused(model):
    with pytest.raises(BudgetError, match="chosen for each prompt"):
        plan_conditions(model, ["routed"], ["auto"])
    with pytest.raises(BudgetError, match="trained Budget Predictor"):
        plan_conditions(tiny_buddy(), ["routed"], ["auto"], auto=True)
