"""The budgets of training: what a recipe's range means for a model, and what each step draws."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from buddy.budget.request import read_blocks
from buddy.errors import RecipeError
from buddy.training.router.recipe import BudgetSettings, Recipe


def budget_range(settings: BudgetSettings, num_blocks: int) -> tuple[int, ...]:
    """The block counts that are drawn, each equally likely.

    Raises:
        BudgetError: The model cannot spend one.
        RecipeError: The range is empty.
    """
    wanted = settings.choices or (settings.low, settings.high)
    blocks = [read_blocks(budget).blocks(num_blocks) for budget in wanted]
    if settings.choices:
        return tuple(blocks)
    if blocks[0] > blocks[1]:
        raise RecipeError(f"budget.low ({settings.low}) is above budget.high ({settings.high})")
    return tuple(range(blocks[0], blocks[1] + 1))


def budgets_at(budgets: Sequence[int], step: int, curriculum_steps: int) -> tuple[int, ...]:
    """The budgets of a run that a step draws from: at first the largest alone.

    Args:
        budgets: In blocks; each is as likely as it is often there.
        step: Counted from 0.
        curriculum_steps: Steps until all are drawn.
    """
    low, high = min(budgets), max(budgets)
    left = max(0.0, 1 - step / curriculum_steps) if curriculum_steps else 0.0
    return tuple(budget for budget in budgets if budget >= low + left * (high - low))


@dataclass(frozen=True, slots=True)
class Draws:
    """What a step draws by its seed, the same on every process.

    Attributes:
        choices: Budgets in blocks that are drawn from.
        budgets: The budget of each row: of each example in turn, as many as it has plans.
        second_routes: Two numbers of each example: whether it is routed again, and where.
        is_dense: Whether skipped blocks are computed too.
    """

    choices: tuple[int, ...]
    budgets: list[int]
    second_routes: list[tuple[float, float]]
    is_dense: bool


def draw_step(
    recipe: Recipe, budgets: Sequence[int], num_examples: int, seed: int, step: int
) -> Draws:
    """Draw for a step.

    Args:
        recipe: Of the run.
        budgets: Of the run, in blocks.
        num_examples: Examples of the whole batch.
        seed: Of the step.
        step: Counted from 0.
    """
    draw = random.Random(seed)
    choices = budgets_at(budgets, step, recipe.budget.curriculum_steps)
    each = recipe.budget.each
    budgets = [draw.choice(choices) for _ in range(num_examples * each)]
    if recipe.budget.sandwich:
        budgets[0::each] = [max(choices)] * num_examples
        budgets[1::each] = [min(choices)] * num_examples
    return Draws(
        choices=choices,
        budgets=[budget for budget in budgets for _ in range(recipe.plans // each)],
        second_routes=[(draw.random(), draw.random()) for _ in range(num_examples)],
        is_dense=draw.random() < recipe.router.dense_share,
    )
