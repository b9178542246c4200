"""The predictor learns what pays, and is told apart from one that does not."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from buddy.data.examples import Source
from buddy.errors import RecipeError, TrainingError
from buddy.routing.budget_predictor import BudgetPredictor, BudgetPredictorConfig
from buddy.routing.router import RouterConfig
from buddy.training.losses import group_advantages
from buddy.training.predictor.evaluation import evaluate_predictor
from buddy.training.predictor.grpo import GRPOSettings, grpo_loss, sample_budgets
from buddy.training.predictor.loss_table import LossTable
from buddy.training.predictor.recipe import BudgetRecipe, PredictorOptimSettings
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.predictor.trainer import PredictorTrainer
from buddy.training.recipe import CheckpointSettings, DataSettings
from tests.product.training.made import examples
from tests.tiny import random_predictor, tiny_buddy

ROUTER = RouterConfig(num_blocks=6, token_width=2)


def recipe(grpo=None, **optim):
    return BudgetRecipe(
        model=CheckpointSettings(name="x"),
        data=DataSettings(train=(Source(path="unused"),)),
        grpo=grpo or GRPOSettings(lambda_perf=1.0, lambda_cost=0.6),
        optim=PredictorOptimSettings(**{"learning_rate": 0.02, "steps": 400, **optim}),
    )


def easy_and_hard(rows=24):
    """Easy prompts lose nothing at three blocks; hard ones gain a nat with every block."""
    prompts = examples(rows)
    is_hard = torch.arange(rows) % 2 == 1
    summaries = torch.where(is_hard, 1.0, -1.0)[:, None].repeat(1, 2)
    hard = torch.tensor([4.0, 3.0, 2.0, 1.0])
    return LossTable(prompts, summaries, torch.where(is_hard[:, None], hard, torch.ones(4)))


def new_predictor(seed=0):
    torch.manual_seed(seed)
    return BudgetPredictor(ROUTER, BudgetPredictorConfig(rank=4))


def test_it_spends_on_hard_prompts_and_saves_on_easy_ones():
    table, predictor = easy_and_hard(), new_predictor()
    trainer = PredictorTrainer(predictor, table, recipe(), table.examples)
    reports = [trainer.step(step) for step in range(trainer.steps)]
    chosen = predictor.choose(table.summaries(table.examples))
    assert chosen.tolist() == [3, 6] * 12
    first, last = reports[:50], reports[-50:]
    # Half of the prompts at -1.3, half at -1.6: nothing but the best is drawn any more.
    assert_close(sum(one.reward for one in last) / 50, -1.45, atol=0.01, rtol=0)
    assert sum(one.reward for one in first) / 50 < -1.6
    assert sum(one.entropy for one in last) < sum(one.entropy for one in first)
    found = evaluate_predictor(predictor, table, recipe().grpo)
    # By hand: easy -1 - 0.6 * 3/6, hard -1 - 0.6; the best constant is 6 blocks: -1 - 0.6.
    assert_close(found.reward, (-1.3 - 1.6) / 2, atol=1e-6, rtol=0)
    assert (found.constant_blocks, found.blocks) == (6, 4.5)
    assert_close(found.constant_reward, -1.6, atol=1e-6, rtol=0)
    assert_close(found.best_reward, found.reward)
    assert_close(found.cross_entropy, 1.0)
    assert found.choices == {"3": 12, "6": 12}
    assert not found.collapsed


def test_choices_are_counted_by_source():
    table = easy_and_hard(8)
    named = [replace(one, source="ab"[row >= 6]) for row, one in enumerate(table.examples)]
    table = LossTable(named, table._summaries, table.by_depth)
    predictor = new_predictor()
    with torch.no_grad():  # easy prompts get 3 blocks, hard ones 6
        predictor.down.weight.fill_(1.0)
        predictor.down.bias.zero_()
        predictor.up.weight.copy_(torch.tensor([-1.0, 0, 0, 1])[:, None].expand(4, 4))
        predictor.up.bias.copy_(torch.tensor([1.0, 0, 0, -1]))
    found = evaluate_predictor(predictor, table, recipe().grpo)
    a, b = found.by_source["a"], found.by_source["b"]
    assert list(found.by_source) == ["a", "b"]
    assert (a["rows"], a["blocks"], b["rows"], b["blocks"]) == (6, 4.5, 2, 4.5)
    # By hand: -1 - 0.6 * 3/6 and -1 - 0.6, against -1.6 at 6 blocks for all.
    for one in (a, b):
        assert_close([one["reward"], one["constant_reward"]], [-1.45, -1.6], atol=1e-6, rtol=0)
    table.by_depth[7] += 1.0  # the one hard prompt of b
    b = evaluate_predictor(predictor, table, recipe().grpo).by_source["b"]
    assert_close([b["reward"], b["constant_reward"]], [-1.95, -2.1], atol=1e-6, rtol=0)


def test_a_constant_choice_is_a_collapse():
    table = easy_and_hard()
    found = evaluate_predictor(new_predictor(), table, recipe().grpo)
    assert found.collapsed
    assert found.choices == {"3": 24}
    assert found.reward < found.constant_reward < found.best_reward
    few = LossTable(table.examples[:4], table._summaries[:4], table.by_depth[:4])
    assert not evaluate_predictor(new_predictor(), few, recipe().grpo).collapsed


def test_a_step_is_the_written_formulas_and_one_adamw_update():
    table, predictor, mirror = easy_and_hard(), new_predictor(), new_predictor()
    trainer = PredictorTrainer(predictor, table, recipe(seed=3), table.examples)
    report = trainer.step(0)
    batch = trainer.order[0]
    optimizer = torch.optim.AdamW(mirror.parameters(), lr=0.02, weight_decay=0.0)
    logits = mirror(table.summaries(batch))
    blocks = sample_budgets(logits, 4, 3 * 1_000_003)
    reward = -1.0 * table.losses(batch, blocks) - 0.6 * blocks / 6
    out = grpo_loss(logits, blocks, group_advantages(reward), recipe().grpo)
    out.loss.backward()
    optimizer.step()
    assert_close(report.loss, out.loss.item())
    assert_close(report.reward, reward.mean().item())
    assert_close(report.blocks, blocks.double().mean().item())
    for mine, other in zip(predictor.parameters(), mirror.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert not torch.equal(predictor.up.weight, new_predictor().up.weight)


def test_live_and_tabled_rewards_train_the_same_predictor(tmp_path):
    from buddy.training.predictor.loss_table import measure_table

    live = RewardModel(tiny_buddy("qwen3"))
    rows = examples(6)
    table = measure_table(live, rows, tmp_path / "t.safetensors", lowest=3, batch_size=3)
    trained = []
    for prompts in (live, table):
        torch.manual_seed(0)
        predictor = BudgetPredictor(live.router.config)
        trainer = PredictorTrainer(predictor, prompts, recipe(), rows)
        reports = [trainer.step(step) for step in range(6)]
        trained.append((reports, predictor))
    for one, other in zip(trained[0][0], trained[1][0], strict=True):
        assert one.reward == pytest.approx(other.reward, abs=1e-4)
        assert one.blocks == other.blocks
    # atol: AdamW divides by the gradient's size, so differences in the last bits grow.
    for one, other in zip(*(predictor.parameters() for _, predictor in trained), strict=True):
        assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_nothing_of_the_model_is_trained():
    buddy = tiny_buddy("qwen3")
    buddy.requires_grad_(False)
    before = {name: value.clone() for name, value in buddy.state_dict().items()}
    predictor = random_predictor(buddy.router)
    start = predictor.up.weight.clone()
    PredictorTrainer(predictor, RewardModel(buddy), recipe(), examples(4)).step(0)
    for name, value in buddy.state_dict().items():
        assert torch.equal(value, before[name])
    assert not torch.equal(predictor.up.weight, start)


def test_nan_stops_training_and_changes_nothing():
    table, predictor = easy_and_hard(), new_predictor()
    trainer = PredictorTrainer(predictor, table, recipe(), table.examples)
    trainer.step(0)
    before = {name: value.clone() for name, value in predictor.state_dict().items()}
    table.by_depth.fill_(torch.nan)
    with pytest.raises(TrainingError, match="step 2 is NaN"):
        trainer.step(1)
    for name, value in predictor.state_dict().items():
        assert torch.equal(value, before[name])


def test_too_few_rows_are_refused():
    table = easy_and_hard()
    with pytest.raises(RecipeError, match="1 training rows do not fill one batch of 2"):
        PredictorTrainer(new_predictor(), table, recipe(), table.examples[:1])
