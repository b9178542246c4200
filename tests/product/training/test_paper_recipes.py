"""The recipes of the paper say what the paper says, as far as it does."""

from pathlib import Path

from buddy.settings import read_recipe
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.router.budgets import budget_range, draw_step
from buddy.training.router.recipe import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def test_stage_1():
    recipe = read_recipe(Recipe, RECIPES / "paper.toml")
    (rows,) = recipe.data.train
    assert (rows.hub, rows.template, rows.start, rows.stop) == (
        "yahma/alpaca-cleaned",
        "alpaca",
        0,
        None,
    )
    assert (recipe.data.max_tokens, recipe.model.dtype, recipe.lora.rank) == (512, "bfloat16", 8)
    optim = recipe.optim
    assert (optim.learning_rate, optim.warmup_steps, optim.batch_size, optim.epochs) == (
        1e-4,
        100,
        8,
        2,
    )
    assert optim.router_learning_rate is None  # the adapters' own
    router = recipe.router
    assert (router.relaxation, router.omega, router.rank) == ("softmax", 0.1, 32)
    assert (router.planner.context, router.planner.context_layer) == ("value", 1)


def test_every_example_draws_one_of_five_budgets():
    recipe = read_recipe(Recipe, RECIPES / "paper.toml")
    budgets = budget_range(recipe.budget, 32)
    assert budgets == (32, 28, 24, 20, 16)  # 0, 4, 8, 12 and 16 removed
    drawn = [
        budget
        for step in range(500)
        for budget in draw_step(recipe, budgets, 8, seed=step, step=step).budgets
    ]
    counts = [drawn.count(budget) for budget in budgets]
    assert sum(counts) == 4000
    assert all(abs(count - 800) < 4 * (4000 * 0.2 * 0.8) ** 0.5 for count in counts)


def test_stage_2():
    recipe = read_recipe(BudgetRecipe, RECIPES / "paper-budget.toml")
    assert (recipe.grpo.samples, recipe.grpo.lambda_perf, recipe.grpo.lambda_cost) == (4, 5.0, 0.05)
    optim = recipe.optim
    assert (optim.learning_rate, optim.batch_size, optim.steps) == (1e-5, 2, 10_000)
    assert not optim.standardise
    (rows,), (others,) = recipe.data.train, recipe.data.validation
    assert {rows.hub, others.hub} == {"yahma/alpaca-cleaned"}
    assert (recipe.data.max_tokens, rows.stop) == (512, others.start)
    assert recipe.measure.precompute
