"""PuDDing: one of a few fixed sets of blocks for each prompt, named by a classifier.

The method's own classifier is a BERT that reads the prompt's text. This one reads the mean of the
values that the model's first block caches for the prompt, as Buddy's planner pools them: it needs
no second model.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from buddy.budget.blocks import MIN_BLOCKS
from buddy.depth.policy import (
    BatchSize,
    BlockScores,
    DepthPolicy,
    Observation,
    PolicyResources,
    RowBudgets,
    TensorState,
    check_state,
)
from buddy.errors import PolicyError, shown
from buddy.policies.learned import LearnedPart, check_fits, need_part
from buddy.routing.planner import ContextState, read_context
from buddy.settings import Range, check_ranges

CONTEXT_LAYER: Final = 1
"""Blocks that run before the set is chosen: the first, whose values are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PuddingConfig:
    """The sets, and the size of the classifier that chooses one; JSON in a checkpoint.

    Raises:
        PolicyError: A set is no removal order of the middle blocks, or a depth no depth.
    """

    num_blocks: Annotated[int, Range(high=1024)]
    """Blocks of the model."""
    width: Annotated[int, Range(1, 2**20)]
    """KV heads times head size: what is read of each token."""
    orders: tuple[tuple[int, ...], ...]
    """The sets, each as the order in which its blocks go: all but the first and the last."""
    depths: tuple[int, ...]
    """Blocks that ran when the classifier's targets were measured, ascending."""
    hidden: Annotated[int, Range(1, 2**16)] = 64
    """Width of the classifier's hidden layer."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        if self.num_blocks < MIN_BLOCKS:
            raise PolicyError(
                f"a model of {self.num_blocks} blocks has none between the first and the last to "
                f"remove: num_blocks must be at least {MIN_BLOCKS}"
            )
        middle = list(range(1, self.num_blocks - 1))
        wrong = [order for order in self.orders if sorted(order) != middle]
        if wrong or not self.orders:
            raise PolicyError(
                f"orders must name each of blocks 1 to {self.num_blocks - 2} once, in one order or "
                f"more, got {shown(list(wrong[0])) if wrong else 'none'}"
            )
        ascending = sorted(set(self.depths)) == list(self.depths)
        if not self.depths or not ascending or not set(self.depths) <= {*middle, max(middle) + 1}:
            raise PolicyError(
                f"depths must be ascending numbers of blocks from 1 to {self.num_blocks - 1}, got "
                f"{shown(list(self.depths))}"
            )


class PuddingClassifier(LearnedPart):
    """Linear, SiLU, Linear: the answer's mean log-likelihood under each set, at each depth.

    The last layer starts at zero, so an untrained classifier holds all sets for alike.

    Args:
        config: Sets and sizes.

    Source: PuDDing; what it reads and its size are ours (see the module).
    """

    policy: ClassVar[str] = "pudding"
    settings: ClassVar[type[Any]] = PuddingConfig

    def __init__(self, config: PuddingConfig) -> None:
        super().__init__(config)
        outputs = len(config.depths) * len(config.orders)
        self.down = nn.Linear(config.width, config.hidden, dtype=torch.float32)
        self.up = nn.Linear(config.hidden, outputs, dtype=torch.float32)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, summary: Float[Tensor, "batch width"]) -> Float[Tensor, "batch depths sets"]:
        """Predicted log-likelihoods, nats per token."""
        with torch.autocast(summary.device.type, enabled=False):
            outputs: Tensor = self.up(nn.functional.silu(self.down(summary.float())))
        return outputs.view(-1, len(self.config.depths), len(self.config.orders))


def prompt_summary(seen: Observation) -> Float[Tensor, "batch width"]:
    """Mean of the first block's values over the tokens that the router sees; zero without any."""
    values = read_context(seen, "value")
    return ContextState.empty(values).add(values, seen.router_sees, 1.0).pooled()


@dataclass(frozen=True, slots=True)
class PuddingState(TensorState):
    """What was predicted from the prompt; what comes later changes nothing.

    Attributes:
        predicted: By depth and set.
        is_decided: False where the router has seen no token yet.
    """

    predicted: Float[Tensor, "batch depths sets"]
    is_decided: Bool[Tensor, " batch"]


class PuddingPolicy(DepthPolicy):
    """Blocks go in the order of the set that suits the prompt best, for prompt and answer alike.

    The prompt is what the router first sees of a sequence. A set stands for any budget: of its
    order as many blocks go as the budget asks. Where targets were measured at several depths, those
    of the depth nearest to the budget decide, the smaller of two as near. Of equal sets the first
    is taken.

    Args:
        part: The classifier, and its sets.
        only: Number of a set that is taken for every prompt.

    Raises:
        PolicyError: There is no such set.
    """

    name = "pudding"

    def __init__(self, part: PuddingClassifier, only: int | None = None) -> None:
        config: PuddingConfig = part.config
        super().__init__(config.num_blocks)
        self.part, self.only = part, only
        self.context_layer = CONTEXT_LAYER if only is None else 0
        if only is not None and not 0 <= only < len(config.orders):
            raise PolicyError(
                f"policy pudding:SET takes the number of a set, from 0 to "
                f"{len(config.orders) - 1}, got {only}"
            )
        self._scores = torch.zeros(len(config.orders), config.num_blocks)  # [sets, L]
        for row, order in enumerate(config.orders):
            self._scores[row, list(order)] = torch.arange(1.0, len(order) + 1)
        self._depths = torch.tensor(config.depths)

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "PuddingPolicy":
        """Make it from `pudding`, or from `pudding:SET`, which takes one set for every prompt."""
        part = need_part(PuddingClassifier, resources)
        if resources.backbone is not None:
            phrase = "to read {} numbers a token and the model caches {}"
            check_fits(cls.name, phrase, part.config.width, resources.backbone.kv_width)
        if not argument:
            return cls(part)
        if not argument.isascii() or not argument.isdecimal() or len(argument) > 9:
            raise PolicyError(
                f"policy pudding:SET takes the number of a set, as in pudding:0, got "
                f"{shown(argument)}"
            )
        return cls(part, int(argument))

    def observe(self, state: Any, seen: Observation) -> PuddingState | BatchSize:
        """Predict from the first tokens that the router sees; later ones change nothing."""
        if self.only is not None:
            return BatchSize.of(seen)
        check_state(state, PuddingState, self.name)
        if isinstance(state, PuddingState) and bool(state.is_decided.all()):
            return state
        predicted, is_decided = self.part(prompt_summary(seen)), seen.router_sees.any(1)
        if state is None:
            return PuddingState(predicted, is_decided)
        was = state.is_decided
        return PuddingState(
            torch.where(was[:, None, None], state.predicted, predicted), was | is_decided
        )

    def choose(self, state: PuddingState, blocks: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The number of each row's set at its budget.

        Raises:
            PolicyError: A prediction is NaN.
        """
        gap = (blocks[:, None] - self._depths.to(blocks.device)).abs()
        nearest = gap.argmin(1).to(state.predicted.device)  # the first of equals
        rows = torch.arange(len(nearest), device=nearest.device)
        predicted = state.predicted[rows, nearest]  # [B, sets]
        if bool(predicted.isnan().any()):
            raise PolicyError(
                "a predicted log-likelihood is NaN, so no set can be chosen: the classifier's "
                "weights or its input are broken; name a set, as in pudding:0, or load another "
                "checkpoint"
            )
        return predicted.argmax(1)

    def scores(self, state: PuddingState | BatchSize, blocks: RowBudgets) -> BlockScores:
        """Place in the removal order of the row's set: the later, the higher."""
        if isinstance(state, BatchSize):
            assert self.only is not None
            return self._scores[self.only].to(state.device).expand(len(state), -1)
        return self._scores.to(state.predicted.device)[self.choose(state, blocks)]

    def describe(self) -> str:
        """A few words for a summary line."""
        sets = len(self.part.config.orders)
        return f"PuDDing, {f'one of {sets} sets' if self.only is None else f'set {self.only}'}"
