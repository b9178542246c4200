"""The recipe of stage 2: everything that fixes a training of the Budget Predictor."""

from dataclasses import dataclass, field
from typing import Annotated

from buddy.routing.budget_predictor import BudgetPredictorConfig
from buddy.settings import Range, RecipeTable
from buddy.training.predictor.grpo import GRPOSettings
from buddy.training.recipe import (
    BATCH_SIZE,
    LEARNING_RATE,
    ROWS,
    RUN_SEED,
    STEPS,
    WEIGHT_DECAY,
    CheckpointSettings,
    DataSettings,
    StepLogSettings,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorOptimSettings(RecipeTable):
    """AdamW, at a constant learning rate."""

    learning_rate: Annotated[float, LEARNING_RATE] = 1e-5
    """Learning rate of the predictor."""
    steps: Annotated[int, STEPS] = 10_000
    """Steps of the run."""
    batch_size: Annotated[int, BATCH_SIZE] = 2
    """Prompts a step."""
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0
    """Weight decay of AdamW."""
    standardise: bool = True
    """Learn from summaries less their mean over training prompts, over their deviation; both are
    folded into the predictor afterwards. If false, it learns from them as they are."""
    seed: Annotated[int, RUN_SEED] = 0
    """Seed of the order, the drawn budgets and the predictor's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings(RecipeTable):
    """How losses are come by."""

    precompute: bool = True
    """Measure every training prompt at every depth before the first step. If false, run the model
    at every step, for the drawn budgets alone: for more prompts than steps."""
    batch_size: Annotated[int, BATCH_SIZE] = 4
    """Prompts measured at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorLogSettings(StepLogSettings):
    """What is written while training."""

    every: Annotated[int, STEPS] = 50
    evaluate_every: Annotated[int, Range(0, 10**9)] = 1000
    """Steps between two evaluations; 0 = at the end alone."""
    evaluate_rows: Annotated[int, ROWS] = 64
    """Validation rows of an evaluation, drawn once; each is measured at every depth."""
    save_every: Annotated[int, STEPS] = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRecipe:
    """A training of the Budget Predictor, from the paper's settings where none are given."""

    model: CheckpointSettings
    """What the predictor is made for."""
    data: DataSettings
    """Rows; those for validation tell whether the predictor has collapsed."""
    predictor: BudgetPredictorConfig = field(default_factory=BudgetPredictorConfig)
    """Its size."""
    grpo: GRPOSettings = field(default_factory=GRPOSettings)
    """Reward and loss."""
    optim: PredictorOptimSettings = field(default_factory=PredictorOptimSettings)
    """Optimiser."""
    measure: MeasureSettings = field(default_factory=MeasureSettings)
    """Where losses come from."""
    log: PredictorLogSettings = field(default_factory=PredictorLogSettings)
    """Logs and states."""
