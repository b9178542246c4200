"""The recipe of a gated method: that of Buddy's stage 1, with gates in the place of the router."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Final

from buddy.errors import RecipeError, shown
from buddy.methods.gated.gates import GatedPart
from buddy.methods.rival import check_rival
from buddy.policies.registry import find_method, methods
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import SHARE
from buddy.training.router.recipe import (
    BudgetSettings,
    LogSettings,
    Recipe,
    RouterSettings,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSettings(RecipeTable):
    """How gates are trained, and what holds their depth down."""

    penalty: Annotated[float, Range(0, 1000)]
    """Weight of the method's own term in the loss."""
    target: Annotated[float, SHARE] = 0.5
    """Mean share of the gated blocks that is aimed at."""
    share: Annotated[float, Range(above=0, high=1)] = 0.125
    """Share of a sequence's tokens that run a gated block."""
    width: Annotated[int, Range(1, 2**16)] = 512
    """Width of a router's hidden layer."""
    gate_steps: Annotated[float, SHARE] = 1.0
    """Share of the steps that train the gates; the others train the adapters under them. At 1 both
    are trained in every step, but for `first`, which trains adapters in steps of their own."""
    learning_rate: Annotated[float, Range(0, 1)] = 1e-3
    """Peak learning rate of the gates."""


_ALL_READ: Final = ("penalty", "learning_rate")
"""Settings of every gated method; a `GatedPart` names the others that it `reads`."""


def gates_of(method: str) -> type[GatedPart]:
    """The class of a method's gates.

    Raises:
        RecipeError: It is no gated method.
    """
    known = find_method(method)
    part: type[GatedPart] | None = None if known is None else known.load("part")
    if part is None or not issubclass(part, GatedPart):
        raise RecipeError(
            f"method: expected one with gates, {', '.join(gated_methods())}, got {shown(method)}"
        )
    return part


def gated_methods() -> dict[str, type[GatedPart]]:
    """Every gated method, by name."""
    parts = {method.name: method.load("part") for method in methods() if method.part is not None}
    return {name: part for name, part in parts.items() if issubclass(part, GatedPart)}


def _no_router() -> RouterSettings:
    return RouterSettings(policy="full")


def _full_budget() -> BudgetSettings:
    return BudgetSettings(choices=("1.0",))


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedRecipe(Recipe):
    """A joint training of LoRA and gates."""

    method: str
    """Whose gates."""
    gates: GateSettings
    """How they are trained."""
    router: RouterSettings = field(default_factory=_no_router)
    """There is none."""
    budget: BudgetSettings = field(default_factory=_full_budget)
    """There is none."""
    log: LogSettings = field(default_factory=LogSettings)
    """Logs and states; an evaluation has the depth that the gates choose."""

    def __post_init__(self) -> None:
        reads = (*_ALL_READ, *gates_of(self.method).reads)
        for setting in fields(self.gates):
            value = getattr(self.gates, setting.name)
            if setting.name not in reads and value != setting.default:
                readers = [
                    name for name, part in gated_methods().items() if setting.name in part.reads
                ]
                raise RecipeError(
                    f"gates.{setting.name} is of {' and '.join(readers)} alone: leave it out for "
                    f"{self.method}, got {value:g}"
                )
        if self.lora.rank == 0 and self.gates.learning_rate == 0:
            raise RecipeError("nothing to train: lora.rank and gates.learning_rate are 0")
        if self.lora.rank == 0 and self.gates.gate_steps < 1:
            raise RecipeError(
                "lora.rank is 0, and the steps beyond gates.gate_steps train adapters: set a rank, "
                f"or gates.gate_steps to 1, got {self.gates.gate_steps:g}"
            )
        if self.optim.micro_batch_tokens > 0:
            raise RecipeError(
                "optim.micro_batch_tokens: what a gated method adds to the loss is of the whole "
                f"batch at once: leave it out for {self.method}, and set "
                "optim.activation_checkpointing or a smaller optim.batch_size"
            )
        check_rival(
            self,
            self.method,
            router=(_no_router(), "a gated method has none"),
            budget=(_full_budget(), "a gated method keeps none"),
        )
        if self.log.evaluate_budgets == LogSettings().evaluate_budgets:  # not named
            object.__setattr__(self, "log", replace(self.log, evaluate_budgets=("1.0",)))
        if self.log.evaluate_budgets != ("1.0",):
            raise RecipeError(
                "log.evaluate_budgets: a gated method keeps no budget: leave it out, and name "
                "thresholds when you measure, as in --policy d-llm:0.4"
            )
