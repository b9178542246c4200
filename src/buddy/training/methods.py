"""The methods that `buddy train` trains: a recipe names one, and the registry says the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from buddy.errors import PolicyError, RecipeError, shown
from buddy.policies.registry import Method, find_method, methods
from buddy.settings import build, read_values

DEFAULT_METHOD: Final = "buddy"
KEY: Final = "method"
"""Key at the top of a recipe, as in `method = "pudding"`."""
_JOINT: Final = Method(
    name=DEFAULT_METHOD,
    policy="buddy.policies.routed:RoutedPolicy",
    recipe="buddy.training.router.recipe:Recipe",
    train="buddy.training.router.run:train",
    label="Buddy",
    is_joint=True,
)


def trained_methods() -> dict[str, Method]:
    """Every method that has a training, by the name that a recipe gives it."""
    return {method.name: method for method in (_JOINT, *methods()) if method.train is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunListener:
    """Whom the run of a method tells how it goes."""

    measured: Callable[[str, int, int], None] = lambda what, done, total: None
    """What is measured before the first step, how much of it is done, and of how much."""
    started: Callable[[int, int], None] = lambda step, steps: None
    """Steps done by an earlier run, and steps in all."""
    stepped: Callable[[int, float], None] = lambda step, loss: None
    """Called after every step: how many are done, and the loss of the last."""
    told: Callable[[str], None] = lambda text: None
    """A line about what was found, such as an evaluation."""
    warned: Callable[[str], None] = lambda text: None
    """When something looks wrong."""


def read_method(path: Path, changes: Sequence[str] = ()) -> tuple[Method, Any]:
    """The method that a recipe names, and the recipe.

    Args:
        path: TOML; without a key `method` at its top it is one of `buddy`.
        changes: As `settings.read_recipe` takes them; `method=NAME` changes the method.

    Raises:
        RecipeError: The file cannot be read, there is no such method, or a key or a value does not
            fit it.
    """
    values = read_values(path, changes)
    name = values.pop(KEY, DEFAULT_METHOD)
    method = _JOINT if name == DEFAULT_METHOD else None
    try:
        if method is None and isinstance(name, str):
            method = find_method(name)
    except PolicyError as error:
        raise RecipeError(f"{path}: {KEY}: {error}") from error
    if method is None or method.train is None:
        known = ", ".join(sorted(trained_methods()))
        raise RecipeError(f"{path}: {KEY}: expected one of {known}, got {shown(name)}")
    kind = method.load("recipe")
    if KEY in {field.name for field in fields(kind)}:
        values[KEY] = method.name
    return method, build(kind, values, str(path))
