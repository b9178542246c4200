"""The recipe of stage 2: everything that fixes a training of the Budget Predictor."""

from dataclasses import dataclass, field
from typing import Literal

from buddy.errors import RecipeError
from buddy.routing.budget_predictor import BudgetPredictorConfig
from buddy.training.joint.recipe import DataSettings
from buddy.training.predictor.grpo import GRPOSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """What stage 1 made; none of it is trained."""

    name: str
    """A Buddy checkpoint with a router."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the backbone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorOptimSettings:
    """AdamW, at a constant learning rate."""

    learning_rate: float = 1e-5
    """Of the predictor."""
    steps: int = 10_000
    """Steps of the run."""
    batch_size: int = 2
    """Prompts a step."""
    weight_decay: float = 0.0
    """Of AdamW."""
    standardise: bool = True
    """Learn from summaries less their mean over training prompts, over their deviation; both are
    folded into the predictor afterwards. If false, it learns from them as they are."""
    seed: int = 0
    """Of the order, the drawn budgets and the predictor's start."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.steps < 1:
            raise RecipeError("batch_size and steps must be at least 1")
        if self.learning_rate <= 0:
            raise RecipeError(f"learning_rate must be positive, got {self.learning_rate}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """How losses are come by."""

    precompute: bool = True
    """Measure every training prompt at every depth before the first step. If false, run the model
    at every step, for the drawn budgets alone: for more prompts than steps."""
    batch_size: int = 4
    """Prompts measured at a time."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RecipeError(f"batch_size must be at least 1, got {self.batch_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorLogSettings:
    """What is written while training."""

    every: int = 50
    """Steps that one line of the log averages over."""
    evaluate_every: int = 1000
    """Steps between two evaluations; 0 = at the end alone."""
    evaluate_rows: int = 64
    """Validation rows of an evaluation, drawn once; each is measured at every depth."""
    save_every: int = 1000
    """Steps between two training states, from which a run can go on."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSON lines."""

    def __post_init__(self) -> None:
        if min(self.every, self.save_every, self.evaluate_rows) < 1 or self.evaluate_every < 0:
            raise RecipeError("every, save_every and evaluate_rows must be at least 1")


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
