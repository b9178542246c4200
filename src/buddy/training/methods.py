"""Stages and methods that `buddy train` trains: a recipe tells which, the registry the rest."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from buddy.errors import PolicyError, RecipeError, shown
from buddy.policies.registry import Method, find_method, methods
from buddy.settings import build, read_values

DEFAULT_METHOD: Final = "buddy"
KEY: Final = "method"
"""Key at the top of a recipe, as in `method = "pudding"`."""
_POLICY: Final = "buddy.policies.routed:RoutedPolicy"
STAGES: Final = {
    stage.name: stage
    for stage in (
        Method(
            name=DEFAULT_METHOD,
            policy=_POLICY,
            recipe="buddy.training.router.recipe:Recipe",
            train="buddy.training.router.run:train",
            label="Buddy",
        ),
        Method(
            name="route",
            policy=_POLICY,
            recipe="buddy.training.route.recipe:RouteRecipe",
            train="buddy.training.route.run:train_route",
        ),
        Method(
            name="predictor",
            policy=_POLICY,
            recipe="buddy.training.predictor.recipe:BudgetRecipe",
            train="buddy.training.predictor.run:train_budget",
        ),
        Method(
            name="ledger",
            policy=_POLICY,
            recipe="buddy.training.ledger.recipe:LedgerRecipe",
            train="buddy.training.ledger.run:train_ledger",
        ),
    )
}
"""The stages of Buddy's own training."""
_STAGE_OF_TABLE: Final = {
    "ledger": "ledger",
    "search": "route",
    **dict.fromkeys(("grpo", "measure", "predictor"), "predictor"),
}
"""Tables that one stage alone has."""


def trained_methods() -> dict[str, Method]:
    """Every method that has a training, by the name that a recipe gives it."""
    return {
        method.name: method for method in (*STAGES.values(), *methods()) if method.train is not None
    }


def read_method(
    path: Path, changes: Sequence[str] = (), stage: str | None = None
) -> tuple[Method, Any]:
    """The stage or the method that a recipe is of, and the recipe.

    Args:
        path: TOML. Its key `method` names what is trained; where it has none, tables that one stage
            alone has tell the stage, and others are of `buddy`.
        changes: As `settings.read_recipe` takes them; `method=NAME` changes the method.
        stage: One of `STAGES`, that a recipe without the key is of, and no recipe is not.

    Raises:
        RecipeError: The file cannot be read, there is no such method, it is not of this stage, or a
            key or a value does not fit it.
    """
    values = read_values(path, changes)
    by_table = [_STAGE_OF_TABLE[table] for table in _STAGE_OF_TABLE if table in values]
    name = values.pop(KEY, stage or (*by_table, DEFAULT_METHOD)[0])
    if stage not in (None, name):
        raise RecipeError(
            f"{path}: {KEY}: expected {stage}, got {shown(name)}: buddy train runs it"
        )
    method = None
    if isinstance(name, str):
        try:
            method = STAGES.get(name) or find_method(name)
        except PolicyError as error:
            raise RecipeError(f"{path}: {KEY}: {error}") from error
    if method is None or method.train is None:
        known = ", ".join(sorted(trained_methods()))
        raise RecipeError(f"{path}: {KEY}: expected one of {known}, got {shown(name)}")
    kind = method.load("recipe")
    if KEY in {field.name for field in fields(kind)}:
        values[KEY] = method.name
    return method, build(kind, values, str(path))
