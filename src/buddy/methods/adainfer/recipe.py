"""The recipe of AdaInfer: rows, the classifiers' first block, and the depth that is wanted."""

from dataclasses import dataclass, field
from typing import Annotated

from buddy.budget.request import read_blocks, read_budget
from buddy.errors import RecipeError, shown
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import ROWS, RUN_SEED, DataSettings, ModelSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSettings(RecipeTable):
    """What is fitted, and the threshold."""

    first_exit: Annotated[int, Range(1, 10_000)] = 8
    """Fewest blocks that run."""
    tokens: Annotated[int, Range(100, 10**7)] = 4000
    """Answer tokens that the classifiers are fitted on, drawn from the training rows."""
    folds: Annotated[int, Range(2, 20)] = 5
    """Parts of the cross-validation; a row is in one."""
    ridge: Annotated[float, Range(above=0, high=1e3)] = 1e-4
    """Weight of the squared coefficients beside the mean loss, on standardised features."""
    threshold: Annotated[float, Range(0, 1)] = 0.9
    """Probability above which a token stops; not used where `mean_depth` is set."""
    mean_depth: str | None = None
    """Blocks that a token is to run on average, such as "22 blocks"; its threshold is searched."""
    depth_rows: Annotated[int, ROWS] = 16
    """Rows that the search runs: validation rows, or training rows where there are none."""
    tolerance: Annotated[float, Range(above=0, high=100)] = 0.25
    """Blocks by which the mean depth may miss."""
    seed: Annotated[int, RUN_SEED] = 0
    """Fixes the draws of tokens and of rows."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if self.mean_depth is None:
            return
        number = read_budget(self.mean_depth).number
        if number is None or number.amount == 0:
            raise RecipeError(
                'mean_depth is a count or a share, such as "22 blocks", got '
                f"{shown(self.mean_depth)}"
            )

    def wanted_depth(self, num_blocks: int) -> float | None:
        """The mean depth in blocks; None where the threshold is given."""
        if self.mean_depth is None:
            return None
        return float(read_blocks(self.mean_depth).exact(num_blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaInferRecipe:
    """A fit of AdaInfer's classifiers; the model's weights stay as they are."""

    data: DataSettings
    """Rows."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Base model, or a Buddy checkpoint of one."""
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    """Features, fit and threshold."""
