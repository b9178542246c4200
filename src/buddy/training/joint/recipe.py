"""The recipe of stage 1: everything that fixes a joint training of LoRA and router."""

from dataclasses import dataclass, field
from typing import Literal

from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.routing.planner import PlannerConfig

Relaxation = Literal["softmax", "scaled-softmax", "sigmoid", "gumbel"]
Method = Literal["straight-through", "policy-gradient"]
Schedule = Literal["linear", "cosine", "constant"]
Weighting = Literal["token", "example"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The base model."""

    name: str = "smollm2-135m"
    """Preset, hub id, folder or GGUF file."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the frozen backbone; adapters and router are float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Training and validation rows."""

    train: tuple[Source, ...]
    """Where the training rows come from."""
    validation: tuple[Source, ...] = ()
    """Rows that are never trained on, for the evaluation while training."""
    max_tokens: int = 256
    """Longest example, prompt and answer together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Adapters on all linear layers of the blocks."""

    rank: int = 8
    """0 trains no adapters."""
    alpha: float = 16.0
    """Scale: updates are multiplied by alpha / rank."""
    dropout: float = 0.0
    """Of the adapters' input."""
    start: str | None = None
    """A Buddy checkpoint of the same base model whose adapters are trained on; else new ones."""
    keep_context: bool = False
    """No adapter on what the router reads: prompts look to it as they did before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """Inputs of some sources, and the order in which their blocks matter."""

    sources: tuple[str, ...]
    """Of training rows, as their files name them."""
    record: str
    """Of `buddy importance` or `benchmarks/source_orders.py`, measured on such inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Who chooses the blocks while training, and how the choice is learned."""

    policy: str = "routed"
    """`routed` trains a router; any other policy trains the adapters under its plans."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """What the router reads."""
    rank: int = 32
    """Width of the Decision Module."""
    omega: float = 0.1
    """Weight of the prior."""
    prior: str = "default"
    """`default` (the model's own, measured if need be), `none`, or a `buddy importance` record."""
    spread: float = 0.0
    """Standard deviation over prompts of the scores at the start; 0 starts from the prior."""
    orders: tuple[OrderSettings, ...] = ()
    """Kinds of input whose measured orders the router starts from; others start from the prior."""
    method: Method = "straight-through"
    """Gradient of a relaxation of the top-k, or of the probability of sampled plans."""
    relaxation: Relaxation = "softmax"
    """Continuous stand-in for the top-k in the backward pass."""
    temperature: float = 1.0
    """Of the sigmoid, of the Gumbel noise's softmax, and of sampled plans."""
    samples: int = 2
    """Plans per example; `policy-gradient` only."""
    dense_share: float = 0.0
    """Share of steps that compute skipped blocks too, for their gates' gradients."""
    second_route: float = 0.0
    """Share of examples that are routed again within their answer, as decoding does."""
    coefficient: float = 1.0
    """Weight of the policy gradient beside the cross-entropy."""

    def __post_init__(self) -> None:
        for name in ("dense_share", "second_route"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.orders and self.policy != "routed":
            raise RecipeError(
                f"orders start a router, and policy {self.policy!r} has none: leave them out, as "
                "by --set router.orders=[]"
            )
        named = [source for one in self.orders for source in one.sources]
        if len(set(named)) < len(named):
            twice = next(source for source in named if named.count(source) > 1)
            raise RecipeError(f"orders: source {twice!r} is named twice: it follows one order")
        if self.orders and (self.spread > 0 or self.planner.pool == "scores"):
            raise RecipeError('orders go with neither spread nor pool="scores": leave one out')
        if self.spread < 0:
            raise RecipeError(f"spread must not be negative, got {self.spread}")
        if self.temperature <= 0:
            raise RecipeError(f"temperature must be positive, got {self.temperature}")
        if self.method == "policy-gradient" and self.samples < 2:
            raise RecipeError(
                f"policy-gradient compares plans: samples must be at least 2, got {self.samples}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSettings:
    """The budget that each example of each batch draws."""

    low: str = "0.5"
    """Smallest, as a caller writes it."""
    high: str = "1.0"
    """Largest; every block count between is equally likely."""
    choices: tuple[str, ...] = ()
    """In place of the range: these alone, equally likely."""
    full_prompts: float = 0.0
    """Share of examples whose prompt runs at full depth, whatever the answer's budget is."""
    mixed_answers: float = 0.0
    """Share of those examples whose depth changes within the answer, as a ledger changes it."""
    stretch: int = 8
    """Mean tokens from one change of depth to the next, in such answers."""

    def __post_init__(self) -> None:
        for name in ("full_prompts", "mixed_answers"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.stretch < 1:
            raise RecipeError(f"stretch must be at least 1 token, got {self.stretch}")
        if self.mixed_answers > 0 and self.full_prompts == 0:
            raise RecipeError(
                "mixed_answers is a share of the examples of full_prompts, and that is 0: set it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings:
    """AdamW and its schedule."""

    learning_rate: float = 1e-4
    """Of the adapters, at its peak."""
    router_learning_rate: float | None = None
    """Of the router; the adapters' if not set, and 0 leaves the router as it starts."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises from zero."""
    schedule: Schedule = "linear"
    """How it falls from there to zero, if it does."""
    epochs: float = 2.0
    """Passes over the data; not used where `steps` is set."""
    steps: int | None = None
    """Steps of the run."""
    batch_size: int = 8
    """Examples a step, over all processes."""
    weight_decay: float = 0.0
    """Of AdamW."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm, adapters and router each on their own."""
    loss: Weighting = "token"
    """Every answer token counts the same, or every example does."""
    seed: int = 0
    """Of the order, the budgets, the noise and the adapters' start."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.steps is not None and self.steps < 1):
            raise RecipeError("batch_size and steps must be at least 1")
        if self.learning_rate <= 0 or self.epochs <= 0:
            raise RecipeError("learning_rate and epochs must be positive")
        if self.router_learning_rate is not None and self.router_learning_rate < 0:
            raise RecipeError(
                f"router_learning_rate must not be negative, got {self.router_learning_rate}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """What is written while training."""

    every: int = 10
    """Steps between two lines of the log."""
    evaluate_every: int = 200
    """Steps between two evaluations; 0 = at the end alone."""
    evaluate_budgets: tuple[str, ...] = ("1.0", "0.875", "0.75", "0.625", "0.5")
    """Budgets of an evaluation."""
    evaluate_rows: int = 64
    """Validation rows of an evaluation, drawn once."""
    save_every: int = 100
    """Steps between two training states, from which a run can go on."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSON lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A joint training of LoRA and router, from the paper's settings where none are given."""

    data: DataSettings
    """Rows."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Base model."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """Who chooses."""
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    """How much may run."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """Optimiser."""
    log: LogSettings = field(default_factory=LogSettings)
    """Logs and states."""

    def __post_init__(self) -> None:
        if self.budget.full_prompts > 0 and self.router.method == "policy-gradient":
            raise RecipeError(
                "policy-gradient samples one plan for prompt and answer: set budget.full_prompts "
                "to 0, or router.method to straight-through"
            )
        if self.lora.rank == 0 and self.router.policy != "routed":
            raise RecipeError("nothing to train: lora.rank is 0 and the policy is not routed")
