"""The methods that `buddy train` trains: a recipe names one, and its table here says the rest."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from buddy.errors import RecipeError, shown
from buddy.settings import build, read_values

DEFAULT_METHOD: Final = "buddy"
KEY: Final = "method"
"""Of a recipe's top level: `method = "pudding"`."""


class Method(NamedTuple):
    """Where a method's parts are, as `module:name`; imported only when asked for.

    Attributes:
        recipe: A dataclass, the recipe; it is told the method where it has a field `method`.
        run: Takes the recipe and the run's folder, with `resume` and `listener` by name, and
            returns the checkpoint's folder. It tells a `RunListener`, or the joint run's.
    """

    recipe: str
    run: str
    is_joint: bool = False
    """Its run is the joint one's, and tells a listener of that."""


_GATED: Final = Method(
    "buddy.methods.gated.recipe:GatedRecipe",
    "buddy.methods.gated.run:train_gated",
    is_joint=True,
)
METHODS: Final[dict[str, Method]] = {
    DEFAULT_METHOD: Method(
        "buddy.training.router.recipe:Recipe", "buddy.training.router.run:train", is_joint=True
    ),
    "adainfer": Method(
        "buddy.methods.adainfer.recipe:AdaInferRecipe",
        "buddy.methods.adainfer.run:train_adainfer",
    ),
    "layerskip": Method(
        "buddy.methods.layerskip.recipe:LayerSkipRecipe",
        "buddy.methods.layerskip.run:train_layerskip",
        is_joint=True,
    ),
    **dict.fromkeys(("first", "d-llm", "mixture-of-depths", "flexidepth", "dash"), _GATED),
    "pudding": Method(
        "buddy.methods.pudding.recipe:PuddingRecipe", "buddy.methods.pudding.run:train_pudding"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunListener:
    """Whom the run of a method tells how it goes."""

    measured: Callable[[str, int, int], None] = lambda what, done, total: None
    """What is measured before the first step, how much of it is done, and of how much."""
    started: Callable[[int, int], None] = lambda step, steps: None
    """Steps done by an earlier run, and steps in all."""
    stepped: Callable[[int, float], None] = lambda step, loss: None
    """After every step: how many are done, and the loss of the last."""
    told: Callable[[str], None] = lambda text: None
    """A line about what was found, such as an evaluation."""
    warned: Callable[[str], None] = lambda text: None
    """When something looks wrong."""


def read_method(path: Path, changes: Sequence[str] = ()) -> tuple[str, Any]:
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
    if not isinstance(name, str) or name not in METHODS:
        raise RecipeError(
            f"{path}: {KEY}: expected one of {', '.join(sorted(METHODS))}, got {shown(name)}"
        )
    kind = _part(METHODS[name].recipe)
    if KEY in {field.name for field in fields(kind)}:
        values[KEY] = name
    return name, build(kind, values, str(path))


def run_of(name: str) -> Callable[..., Path]:
    """What trains by a method's recipe.

    Args:
        name: One of `METHODS`.
    """
    found: Callable[..., Path] = _part(METHODS[name].run)
    return found


def _part(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
