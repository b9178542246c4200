"""Refuses tables of a stage 1 recipe that the training of another method does not have."""

from typing import Any

from buddy.errors import RecipeError
from buddy.training.router.recipe import Recipe


def check_rival(recipe: Recipe, method: str, **absent: tuple[Any, str]) -> None:
    """Refuse what the training of a rival method does not have.

    Args:
        recipe: Of the method.
        method: Its name.
        **absent: Tables that its recipe does not have: what stands there by default, and why.

    Raises:
        RecipeError: One of them is there, a teacher is named, prompts have a weight, or adapters
            know the depth.
    """
    for table, (default, why) in absent.items():
        if getattr(recipe, table) != default:
            raise RecipeError(f"{table}: {why}: leave the table out")
    if recipe.teacher.name is not None:
        raise RecipeError(f"teacher: {method} is trained without one: leave the table out")
    if recipe.lora.depths:
        raise RecipeError(
            f"lora.depths: {method} draws no budget that adapters could know: leave them out"
        )
    if recipe.optim.prompt_loss > 0:
        raise RecipeError(
            f"optim.prompt_loss: {method} is trained on answers alone: leave it out, got "
            f"{recipe.optim.prompt_loss:g}"
        )
