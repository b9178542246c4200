"""The recipe of stage 1: everything that fixes a joint training of LoRA and router."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from buddy.budget.request import read_budget
from buddy.errors import RecipeError, shown
from buddy.routing.planner import PlannerConfig
from buddy.routing.prior import PriorConfig
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import (
    BATCH_SIZE,
    LEARNING_RATE,
    ROWS,
    RUN_SEED,
    SHARE,
    STEPS,
    WEIGHT_DECAY,
    AdaptedModelSettings,
    DataSettings,
    StepLogSettings,
)

Relaxation = Literal["softmax", "scaled-softmax", "skipped-softmax", "sigmoid", "gumbel"]
GradientEstimator = Literal["straight-through", "policy-gradient", "measured"]
Schedule = Literal["linear", "cosine", "constant"]
Weighting = Literal["token", "example"]
OWN_TEACHER: Final = "self"
"""Setting of `teacher.name` by which the model under training teaches itself."""
OWN_PRIORS: Final = ("default", "none")
"""Settings of `router.prior` that name no file."""


def _check_budgets(name: str, budgets: Sequence[str]) -> None:
    """Refuse what no model can spend; what this one can, its blocks say.

    Raises:
        BudgetError: One is neither a share nor a count.
        RecipeError: One is `auto`, or a count that no model has.
    """
    for budget in budgets:
        number = read_budget(budget).number
        if number is None:
            raise RecipeError(
                f"{name}: budgets of a training run are numbers: {budget} is for inference"
            )
        if number.amount == 0:
            raise RecipeError(f"{name}: blocks must be at least 1, got {shown(budget)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings(RecipeTable):
    """Adapters on all linear layers of the blocks."""

    rank: Annotated[int, Range(0, 4096)] = 8
    """0 trains no adapters; the model's hidden size at most."""
    alpha: Annotated[float, Range(above=0, high=1e6)] = 16.0
    """Scale: updates are multiplied by alpha / rank."""
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Dropout of the adapters' input."""
    start: str | None = None
    """A Buddy checkpoint of the same base model whose adapters are trained on; else new ones."""
    keep_context: bool = False
    """No adapter on what the router reads: prompts look to it as they did before the first step."""
    depths: tuple[str, ...] = ()
    """Budgets, rising, at which each rank of an adapter learns a scale, between them on a line. The
    first block, keys and values have none; without budgets, no adapter has any."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        _check_budgets("depths", self.depths)
        if self.depths and self.rank == 0:
            raise RecipeError("depths are of adapters, and rank is 0: set rank, or leave them out")


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings:
    """Inputs of some sources, and the order in which their blocks matter."""

    sources: tuple[str, ...]
    """Sources of training rows, as their files name them."""
    record: str
    """File of `buddy importance` or `benchmarks/source_orders.py`, measured on such inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings(RecipeTable):
    """Who chooses the blocks while training, and how the choice is learned."""

    policy: str = "routed"
    """`routed` trains a router; any other policy trains the adapters under its plans."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """What the router reads."""
    rank: Annotated[int, Range(1, 4096)] = 32
    """Width of the Decision Module; two for each of `orders` at least."""
    omega: Annotated[float, Range(0, 1000)] = 0.1
    """Weight of the prior."""
    prior: str = "default"
    """`default` (the model's own, measured if need be), `none`, or a `buddy importance` record."""
    normalisation: PriorConfig = field(default_factory=PriorConfig)
    """How the importance in that record becomes the prior; `default` and `none` have no such."""
    standardise: bool = False
    """Learn from summaries less their mean over training prompts, over their deviation; both are
    folded into the router afterwards. If false, before the first step, and steps move it less."""
    spread: Annotated[float, Range(0, 1000)] = 0.0
    """Standard deviation over prompts of the scores at the start; 0 starts from the prior."""
    orders: tuple[OrderSettings, ...] = ()
    """Kinds of input whose measured orders the router starts from; others start from the prior."""
    method: GradientEstimator = "straight-through"
    """Gradient of a relaxation of the top-k, of the probability of sampled plans, or of the error
    of scores as predictions of what measured swaps of blocks cost."""
    relaxation: Relaxation = "softmax"
    """Continuous stand-in for the top-k in the backward pass."""
    temperature: Annotated[float, Range(1e-4, 1e4)] = 1.0
    """Temperature of the sigmoid, of the Gumbel noise's softmax, and of sampled plans and swaps."""
    samples: Annotated[int, Range(1, 64)] = 2
    """Plans per example: sampled by `policy-gradient`, or the router's own and the swaps of it that
    `measured` runs."""
    dense_share: Annotated[float, SHARE] = 0.0
    """Share of steps that compute skipped blocks too, for their gates' gradients; without, those
    are zero. `straight-through` only."""
    second_route: Annotated[float, SHARE] = 0.0
    """Share of examples that are routed again within their answer, as decoding does."""
    coefficient: Annotated[float, Range(0, 1000)] = 1.0
    """Weight of the policy gradient, or of what is measured, beside the cross-entropy."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if self.prior in OWN_PRIORS and self.normalisation != PriorConfig():
            raise RecipeError(
                f"normalisation is of a record's importance, and prior is {self.prior!r}: name a "
                "record of buddy importance, or leave normalisation out"
            )
        if self.orders and self.policy != "routed":
            raise RecipeError(
                f"orders start a router, and policy {self.policy!r} has none: leave them out, as "
                "by --set router.orders=[]"
            )
        for name, is_set in (
            ("standardise", self.standardise),
            ("method measured", self.method == "measured"),
        ):
            if is_set and self.policy != "routed":
                raise RecipeError(
                    f"{name} is of a router, and policy {self.policy!r} has none: leave it out"
                )
        if self.standardise and self.planner.pool == "scores":
            raise RecipeError(
                'standardise is of a router that pools tokens, and planner.pool is "scores": set '
                "one of the two"
            )
        named = [source for order in self.orders for source in order.sources]
        if len(set(named)) < len(named):
            twice = next(source for source in named if named.count(source) > 1)
            raise RecipeError(f"orders: source {twice!r} is named twice: it follows one order")
        if self.orders and (self.spread > 0 or self.planner.pool == "scores"):
            raise RecipeError('orders go with neither spread nor pool="scores": leave one out')
        if self.spread > 0 and self.planner.pool == "scores":
            raise RecipeError(
                f'spread is of a router that pools tokens, and planner.pool is "scores": set one '
                f"of the two, got spread {self.spread:g}"
            )
        if self.rank < 2 * len(self.orders):
            raise RecipeError(
                f"rank is {self.rank}: expected two for each of the {len(self.orders)} orders"
            )
        if self.method != "straight-through" and self.samples < 2:
            raise RecipeError(
                f"{self.method} compares plans: samples must be at least 2, got {self.samples}"
            )
        if self.method != "straight-through" and self.dense_share > 0:
            raise RecipeError(
                f"dense_share is of gates, and method {self.method} has none: set it to 0, got "
                f"{self.dense_share:g}"
            )
        if self.relaxation == "skipped-softmax" and self.dense_share == 0:
            raise RecipeError(
                "relaxation skipped-softmax is of gates of skipped blocks, and dense_share is 0, "
                "so that these get no gradient: set it to 1"
            )
        if self.method == "measured" and self.relaxation != "softmax":
            raise RecipeError(
                f"relaxation is of gates, and method measured has none: leave it out, got "
                f"{self.relaxation}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetSettings(RecipeTable):
    """The budget that each example of each batch draws."""

    low: str = "0.5"
    """Smallest, as a caller writes it."""
    high: str = "1.0"
    """Largest; every block count between is equally likely."""
    choices: tuple[str, ...] = ()
    """Budgets in place of the range: these alone, equally likely."""
    each: Annotated[int, Range(1, 64)] = 1
    """Budgets of an example in a step, which computes it once under each of them."""
    sandwich: bool = False
    """The first two of these are the largest and the smallest that the step draws from."""
    curriculum_steps: Annotated[int, Range(0, 10**9)] = 0
    """Steps in which the smallest budget that is drawn falls from the largest, in a line."""
    full_prompts: Annotated[float, SHARE] = 0.0
    """Share of examples whose prompt runs at full depth, whatever the answer's budget is."""
    mixed_answers: Annotated[float, SHARE] = 0.0
    """Share of those examples whose depth changes within the answer, as a ledger changes it."""
    stretch: Annotated[int, Range(1, 10**6)] = 8
    """Tokens from one draw of a depth to the next, in such answers: one and an exponential of this
    mean, rounded down, so half a token more on average; a draw may repeat the depth."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        _check_budgets("low", (self.low,))
        _check_budgets("high", (self.high,))
        _check_budgets("choices", self.choices)
        if self.mixed_answers > 0 and self.full_prompts == 0:
            raise RecipeError(
                "mixed_answers is a share of the examples of full_prompts, and that is 0: set it"
            )
        if self.sandwich and self.each < 2:
            raise RecipeError(
                f"sandwich names two of an example's budgets, and each is {self.each}: set each to "
                "2 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSettings(RecipeTable):
    """A model at full depth, whose distributions are taught beside the data."""

    name: str | None = None
    """It is a preset, hub id, folder, GGUF file or Buddy checkpoint, with the student's tokenizer
    and as many logits, and frozen; or `self`, the student as it is in the step, at full depth. None
    teaches nothing."""
    weight: Annotated[float, Range(above=0, high=1000)] = 1.0
    """The mean cross-entropy with its distributions weighs so much beside the answers' loss."""
    tokens: Literal["all", "answers"] = "all"
    """It teaches every token that is no pad, or those of answers alone."""
    share: Annotated[float, Range(above=0, high=1)] = 1.0
    """This share of these tokens is drawn anew for each step, and no other is taught in it."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if self.name is None and (self.weight, self.tokens, self.share) != (1.0, "all", 1.0):
            raise RecipeError("teacher has no name: name a model, or leave the table out")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimSettings(RecipeTable):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, LEARNING_RATE] = 1e-4
    """Learning rate of the adapters, at its peak."""
    router_learning_rate: Annotated[float, Range(0, 1)] | None = None
    """Learning rate of the router; the adapters' if not set. 0 leaves the router as it starts."""
    warmup_steps: Annotated[int, Range(0, 10**9)] = 100
    """Steps in which the learning rate rises from zero."""
    schedule: Schedule = "linear"
    """How it falls from there to zero, if it does; `constant` falls in the last `decay_steps`."""
    decay_steps: Annotated[int, Range(0, 10**9)] = 0
    """Steps at the end in which a constant rate falls to zero, in a line. How many steps a run has
    in all may be changed until they begin."""
    epochs: Annotated[float, Range(above=0, high=10_000)] = 2.0
    """Passes over the data; not used where `steps` is set."""
    steps: Annotated[int, STEPS] | None = None
    """Steps of the run."""
    batch_size: Annotated[int, BATCH_SIZE] = 8
    """Examples a step, over all processes."""
    micro_batch_tokens: Annotated[int, Range(0, 2**31)] = 0
    """Tokens that a process computes at once, rows times the longest of them: the gradients of a
    batch are summed over such parts, and are those of the batch. At least `data.max_tokens`, for
    each of `router.samples` where plans are sampled; 0 computes all rows at once. A run may go on
    with another number; sums in another order round otherwise, and dropout draws anew."""
    activation_checkpointing: bool = False
    """Each block keeps its input alone for the backward pass and computes the rest again: less than
    half the memory of activations, and about half as much time again. It changes no number, so a
    run may go on with or without it."""
    fsdp: bool = False
    """Whether each of several processes keeps its share of the frozen blocks' weights alone, and
    all gather a block for as long as it runs (FSDP2): for models that no GPU holds whole. It
    changes no number, so a run may go on with or without it."""
    weight_decay: Annotated[float, WEIGHT_DECAY] = 0.0
    """Weight decay of AdamW."""
    max_grad_norm: Annotated[float, Range(above=0, high=1e9)] = 1.0
    """Gradients are scaled down to this norm, adapters and router each on their own."""
    loss: Weighting = "token"
    """Every answer token counts the same, or every example does."""
    average: Annotated[float, Range(0, 0.99999)] = 0.0
    """Each step keeps so much of the mean of weights over steps (the first steps less), which is
    evaluated and saved: 0.99 looks back over some hundred steps; 0 saves the last weights."""
    prompt_loss: Annotated[float, Range(0, 1000)] = 0.0
    """The prompts' mean cross-entropy over tokens weighs so much beside the answers' loss."""
    seed: Annotated[int, RUN_SEED] = 0
    """Seed of the order, the budgets, the noise and the adapters' start."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if self.decay_steps > 0 and self.schedule != "constant":
            raise RecipeError(
                f'decay_steps are of a constant rate, and schedule is "{self.schedule}": leave '
                'them out, or set schedule = "constant"'
            )
        if self.decay_steps > (self.steps or self.decay_steps):
            raise RecipeError(
                f"decay_steps must be at most {self.steps:,}, the steps of the run, got "
                f"{self.decay_steps:,}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings(StepLogSettings):
    """What is written while training."""

    evaluate_every: Annotated[int, Range(0, 10**9)] = 200
    """Steps between two evaluations; 0 = at the end alone."""
    evaluate_budgets: tuple[str, ...] = ("1.0", "0.875", "0.75", "0.625", "0.5")
    """Budgets of an evaluation."""
    evaluate_rows: Annotated[int, ROWS] = 64
    """Validation rows of an evaluation, drawn once."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if not self.evaluate_budgets:
            raise RecipeError("evaluate_budgets has no budget: name at least one")
        _check_budgets("evaluate_budgets", self.evaluate_budgets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A joint training of LoRA and router, from the paper's settings where none are given."""

    data: DataSettings
    """Rows."""
    model: AdaptedModelSettings = field(default_factory=AdaptedModelSettings)
    """Base model."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters."""
    router: RouterSettings = field(default_factory=RouterSettings)
    """Who chooses."""
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    """How much may run."""
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    """Who teaches beside the data."""
    optim: OptimSettings = field(default_factory=OptimSettings)
    """Optimiser."""
    log: LogSettings = field(default_factory=LogSettings)
    """Logs and states."""

    @property
    def plans(self) -> int:
        """Plans of each example in a step."""
        return self.router.samples if self.router.method == "policy-gradient" else self.budget.each

    def __post_init__(self) -> None:
        most, row = self.optim.micro_batch_tokens, self.plans * self.data.max_tokens
        if 0 < most < row:
            raise RecipeError(
                f"optim.micro_batch_tokens must be at least {row:,}, the tokens of one example "
                f"(data.max_tokens times its plans), or 0, got {most:,}"
            )
        if self.router.method != "straight-through":
            for name, share in (
                ("budget.full_prompts", self.budget.full_prompts),
                ("router.second_route", self.router.second_route),
            ):
                if share > 0:
                    raise RecipeError(
                        f"{self.router.method} compares plans that are one for prompt and answer: "
                        f"set {name} to 0, or router.method to straight-through"
                    )
            if self.budget.each > 1:
                raise RecipeError(
                    f"{self.router.method} compares plans at one budget of an example: set "
                    "budget.each to 1, or router.method to straight-through"
                )
        if self.lora.depths and (self.optim.fsdp or self.router.method == "measured"):
            name = "optim.fsdp" if self.optim.fsdp else "router.method measured"
            raise RecipeError(
                f"{name} runs blocks without saying how deep a token runs, which lora.depths "
                "needs: leave one of the two out"
            )
        is_measured = self.router.method == "measured"
        if self.optim.fsdp and (is_measured or self.teacher.name == OWN_TEACHER):
            name = "router.method measured" if is_measured else "teacher.name self"
            raise RecipeError(
                f"optim.fsdp gathers the blocks of training passes, and {name} runs others beside "
                "them: set one of the two"
            )
        if self.optim.fsdp and self.model.quant is not None:
            raise RecipeError(
                f"optim.fsdp shares weights in their own number format, and model.quant is "
                f'"{self.model.quant}": set one of the two'
            )
        if self.lora.rank == 0 and self.router.policy != "routed":
            raise RecipeError("nothing to train: lora.rank is 0 and the policy is not routed")
        if self.lora.rank == 0 and self.optim.router_learning_rate == 0:
            raise RecipeError("nothing to train: lora.rank and optim.router_learning_rate are 0")
