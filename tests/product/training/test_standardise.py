"""Standardised summaries: what is learned does not hang on their scale, and folds away."""

import pytest
import torch
from torch.testing import assert_close

from buddy.data.examples import Source
from buddy.routing.budget_predictor import BudgetPredictor, BudgetPredictorConfig
from buddy.routing.router import RouterConfig
from buddy.training.predictor.grpo import GRPOSettings
from buddy.training.predictor.loss_table import LossTable
from buddy.training.predictor.recipe import BudgetRecipe, PredictorOptimSettings
from buddy.training.predictor.reward_model import StandardisedPrompts, folded
from buddy.training.predictor.trainer import PredictorTrainer
from buddy.training.recipe import CheckpointSettings, DataSettings
from buddy.training.summaries import PROMPTS, Standard, draw_summaries
from tests.product.training.made import examples

ROUTER = RouterConfig(num_blocks=6, token_width=2)
# What pooled values look like: means of all sizes, and small deviations of different sizes.
SCALE, SHIFT = torch.tensor([0.001, 0.004]), torch.tensor([0.27, -0.01])


def new_predictor():
    torch.manual_seed(0)
    return BudgetPredictor(ROUTER, BudgetPredictorConfig(rank=4))


def table(*, scale, shift, rows=24):
    """Odd rows gain a nat with every block; even ones lose nothing at three."""
    is_hard = torch.arange(rows) % 2 == 1
    noise = torch.randn(rows, 2, generator=torch.Generator().manual_seed(1))
    summaries = torch.where(is_hard, 1.0, -1.0)[:, None] + 0.1 * noise
    hard = torch.tensor([4.0, 3.0, 2.0, 1.0])
    by_depth = torch.where(is_hard[:, None], hard, torch.ones(4))
    return LossTable(examples(rows), scale * summaries + shift, by_depth)


def trained(table, *, standardise, steps=150):
    recipe = BudgetRecipe(
        model=CheckpointSettings(name="x"),
        data=DataSettings(train=(Source(path="unused"),)),
        grpo=GRPOSettings(lambda_perf=1.0, lambda_cost=0.6),
        optim=PredictorOptimSettings(learning_rate=0.02, steps=steps),
    )
    predictor, prompts, standard = new_predictor(), table, None
    if standardise:
        standard = Standard.of(draw_summaries(table.summaries, table.examples, seed=0))
        prompts = StandardisedPrompts(table, standard)
    trainer = PredictorTrainer(predictor, prompts, recipe, table.examples)
    for step in range(steps):
        trainer.step(step)
    return folded(predictor, standard)


def logits(predictor, table):
    with torch.no_grad():
        return predictor(table.summaries(table.examples))[:, predictor.lowest - 3 :]


def test_scale_and_shift_of_the_summaries_do_not_change_what_is_learned():
    plain, odd = table(scale=1.0, shift=0.0), table(scale=SCALE, shift=SHIFT)
    one, other = trained(plain, standardise=True), trained(odd, standardise=True)
    # atol: the shift costs digits of the small differences, and 150 steps add up.
    assert_close(logits(one, plain), logits(other, odd), atol=0.02, rtol=0)
    assert other.choose(odd.summaries(odd.examples)).tolist() == [3, 6] * 12


def test_without_it_small_differences_are_not_learned_in_time():
    odd = table(scale=SCALE, shift=SHIFT)
    predictor = trained(odd, standardise=False)
    assert len(set(predictor.choose(odd.summaries(odd.examples)).tolist())) == 1


def test_folding_changes_no_logit_and_not_the_predictor_that_learns():
    torch.manual_seed(3)
    summaries = SCALE * torch.randn(40, 2) + SHIFT
    standard, predictor = Standard.of(summaries), new_predictor()
    torch.nn.init.normal_(predictor.up.weight)
    before = predictor.down.weight.clone()
    ready = folded(predictor, standard)
    expected = predictor((summaries - summaries.mean(0)) / summaries.std(0))
    assert_close(ready(summaries), expected, atol=1e-4, rtol=1e-4)  # sums of other sizes
    assert not torch.allclose(ready.down.weight, before)
    assert torch.equal(predictor.down.weight, before)
    assert torch.equal(folded(predictor, None).down.weight, before)


@pytest.mark.parametrize("rows", [1, 5])
def test_what_never_differs_is_not_blown_up(rows):
    standard = Standard.of(torch.full((rows, 2), 0.3))
    assert standard(torch.full((3, 2), 0.3)).abs().max() < 1e-2
    assert standard(torch.full((3, 2), 0.31)).abs().max() < 1e3


def test_prompts_are_drawn_by_the_seed_and_not_without_end():
    many = table(scale=1.0, shift=0.0, rows=PROMPTS + 40)
    drawn = draw_summaries(many.summaries, many.examples, seed=2)
    assert len(drawn) == PROMPTS
    assert len(drawn.unique(dim=0)) == PROMPTS
    assert torch.equal(drawn, draw_summaries(many.summaries, many.examples, seed=2))
    assert not torch.equal(drawn, draw_summaries(many.summaries, many.examples, seed=3))


def test_losses_are_passed_on():
    odd = table(scale=SCALE, shift=SHIFT)
    prompts = StandardisedPrompts(odd, Standard(SHIFT, SCALE))
    blocks = torch.tensor([[3, 6], [4, 5]])
    some = odd.examples[:2]
    assert torch.equal(prompts.losses(some, blocks), odd.losses(some, blocks))
    assert_close(prompts.summaries(some), (odd.summaries(some) - SHIFT) / SCALE)
