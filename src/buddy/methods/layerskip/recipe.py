"""The recipe of LayerSkip: that of Buddy's stage 1, with exits in place of router and budgets."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from buddy.methods.rival import check_rival
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import SHARE
from buddy.training.router.recipe import BudgetSettings, Recipe, RouterSettings

Curriculum = Literal["rotational", "gradual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitSettings(RecipeTable):
    """Which blocks are dropped, and where the loss is taken."""

    dropout: Annotated[float, SHARE] = 0.2
    """Chance that an example drops the last block; shallower blocks have exponentially less."""
    curriculum: Curriculum = "rotational"
    """`rotational`: every `period`-th exit, another set at every step. `gradual`: the last exit
    first, and one more in equal parts of the first half of the run."""
    period: Annotated[int, Range(1, 10_000)] = 8
    """Distance between two exits of `rotational`, in blocks."""
    scale: Annotated[float, Range(0, 1)] = 1.0
    """Weight of early exits beside the last."""


def _exits_alone() -> RouterSettings:
    return RouterSettings(policy="layerskip")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSkipRecipe(Recipe):
    """A training of LoRA for early exits."""

    exits: ExitSettings = field(default_factory=ExitSettings)
    """Dropout and losses."""
    router: RouterSettings = field(default_factory=_exits_alone)
    """There is none."""

    def __post_init__(self) -> None:
        check_rival(
            self,
            "layerskip",
            router=(_exits_alone(), "layerskip has none"),
            budget=(
                BudgetSettings(),
                "layerskip draws no budgets, its exits are those of exits.curriculum",
            ),
        )
        Recipe.__post_init__(self)
