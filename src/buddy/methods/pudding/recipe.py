"""The recipe of PuDDing: sets, targets, classifier."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from buddy.errors import RecipeError
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import (
    BATCH_SIZE,
    LEARNING_RATE,
    ROWS,
    RUN_SEED,
    WEIGHT_DECAY,
    DataSettings,
    ModelSettings,
    StepLogSettings,
)
from buddy.training.router.recipe import BudgetSettings

TaskLoss = Literal["likelihood", "margin"]
"""What a search lowers: minus the mean log-likelihood of the right answer; or the sum of the wrong
answers' mean log-likelihoods, less that of the right one times the number of wrong ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SetSettings(RecipeTable):
    """The search of the sets: one for each task and loss."""

    tasks: tuple[str, ...] = ()
    """Sources of training rows, as their files name them; all if none is named."""
    losses: tuple[TaskLoss, ...] = ("likelihood", "margin")
    """What is lowered."""
    items: Annotated[int, ROWS] = 128
    """First training rows of a task that a search reads; fewer where it has not as many."""
    rounds: Annotated[int, Range(1, 1024)] | None = None
    """Blocks that are removed one by one; the rest follow as the last round ranks them. All but the
    first and the last block if not set."""
    batch_size: Annotated[int, BATCH_SIZE] = 16
    """Answers at a time."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if not self.losses or len(set(self.losses)) < len(self.losses):
            raise RecipeError("losses must name likelihood, margin or both, each once")
        if len(set(self.tasks)) < len(self.tasks):
            raise RecipeError("tasks must name each task once")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSettings(RecipeTable):
    """What the classifier learns: the answers' log-likelihoods under every set."""

    depths: tuple[str, ...] = ("0.8",)
    """Budgets at which the sets are compared, each below full depth."""
    batch_size: Annotated[int, BATCH_SIZE] = 8
    """Prompts at a time."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if not self.depths:
            raise RecipeError("depths has no budget: name at least one below full depth")
        BudgetSettings(choices=self.depths)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSettings(RecipeTable):
    """Its size."""

    hidden: Annotated[int, Range(1, 2**16)] = 64
    """Width of the hidden layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings(RecipeTable):
    """AdamW on the mean squared error; the learning rate rises, then stays."""

    learning_rate: Annotated[float, LEARNING_RATE] = 1e-3
    """Peak of the learning rate. (The method's own, 1e-5, is that of a BERT.)"""
    warmup_steps: Annotated[int, Range(0, 10**9)] = 20
    """Steps in which it rises from zero. (The method's own: 500, of a longer run.)"""
    epochs: Annotated[int, Range(1, 10**6)] = 10
    """Passes over the training rows."""
    batch_size: Annotated[int, BATCH_SIZE] = 32
    """Prompts a step."""
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.01
    """Weight decay of AdamW."""
    seed: Annotated[int, RUN_SEED] = 0
    """Fixes the order of rows and the classifier's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PuddingRecipe:
    """Sets and classifier for a model that stays as it is."""

    data: DataSettings
    """Rows with right and wrong answers, as `buddy data --wrong` writes them."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Base model, or a checkpoint whose adapters are used."""
    sets: SetSettings = field(default_factory=SetSettings)
    """Their search."""
    targets: TargetSettings = field(default_factory=TargetSettings)
    """What is learned."""
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    """Its size."""
    optim: FitSettings = field(default_factory=FitSettings)
    """Optimiser."""
    log: StepLogSettings = field(default_factory=StepLogSettings)
    """Logs and states."""

    def __post_init__(self) -> None:
        if any(source.repeat > 1 for source in (*self.data.train, *self.data.validation)):
            raise RecipeError("data: rows are measured once: leave repeat out")
