"""Methods with a gate at each block, which reads the residual of every token.

The folder of a method says what its gates look like, what they leave, and how they are trained;
what is the same for all stands here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.depth.policy import (
    LaneMask,
    LaneResidual,
    NewTokens,
    OnlinePolicy,
    PerToken,
    Policy,
    PolicyResources,
    Residual,
)
from buddy.errors import PolicyError
from buddy.methods.threshold import read_threshold
from buddy.policies.learned import LearnedPart, check_fits, need_part
from buddy.settings import Range, check_ranges

PerRow = Float[Tensor, " batch"]
Scalar = Float[Tensor, ""]


@dataclass(frozen=True, slots=True)
class Pass:
    """A training pass over whole sequences, as gates may know it.

    Attributes:
        position: Of each token in its sequence.
        is_prompt: What a route may see.
        is_real: False for pads.
        noise: Draws what gates sample.
        adapts: The adapters are trained now and the gates are not.
        whole: Rows and tokens of the batch over all processes, for which noise is drawn; None where
            these rows are all.
        process: This process and how many there are: the first of those rows that is its own, and
            the distance to the next.
        reduce: Sums a tensor over all processes.
    """

    position: Int[Tensor, " tokens"]
    is_prompt: Bool[Tensor, "batch tokens"]
    is_real: Bool[Tensor, "batch tokens"]
    noise: torch.Generator
    adapts: bool = False
    whole: tuple[int, int] | None = None
    process: tuple[int, int] = (0, 1)
    reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def uniform(self) -> Float[Tensor, "batch tokens"]:
        """A number in (0, 1) for each token, the same on every device, whoever computes its row."""
        first, every = self.process
        drawn = torch.rand(self.whole or self.is_real.shape, generator=self.noise)
        drawn = drawn[first::every, : self.is_real.shape[1]].clamp(1e-6, 1 - 1e-6)
        return drawn.to(self.is_real.device)

    def total(self, own: Scalar) -> Scalar:
        """The sum over all processes, with the gradient of this one's part."""
        fixed = own.detach()
        return own + (self.reduce(fixed) - fixed)


@dataclass(frozen=True, slots=True)
class Gate:
    """What gates decided at one block in a training pass.

    Attributes:
        keep: Who counts as running the block; [batch, tokens], or by lane.
        weight: Of the block's result, with the gates' gradient.
        extra: What else is to be made small; None = nothing.
    """

    keep: Bool[Tensor, "*shape"]
    weight: PerToken
    extra: Float[Tensor, ""] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSizes:
    """Sizes of the model that gates are made for; a method that has more inherits these."""

    num_blocks: Annotated[int, Range(3, 2**16)]
    """Blocks of the model."""
    hidden_size: Annotated[int, Range(1, 2**20)]
    """Width of the residual."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)


class GatedPart(LearnedPart, ABC):
    """The gates of a method.

    Attributes:
        reads: Optional settings of `GateSettings` that this method's training has.
        leaves: What a token that skips a block leaves in its cache, as `kv_policy` names it.
        reads_mlp: The method weighs the output of a block's MLP apart.
        sure_tokens: The first tokens of a sequence that run everything.
    """

    settings: ClassVar[type[Any]] = GateSizes
    reads: ClassVar[tuple[str, ...]] = ()
    leaves: ClassVar[Literal["mask", "lazy"]] = "lazy"
    reads_mlp: ClassVar[bool] = False
    sure_tokens: ClassVar[int] = 0

    @classmethod
    def sizes(cls, gates: Any, model: Any) -> dict[str, Any]:
        """What its settings have beside the sizes of the model.

        Args:
            gates: A `GateSettings`, of the recipe.
            model: The model's configuration.
        """
        return {}

    @property
    @abstractmethod
    def governed(self) -> Sequence[int]:
        """Blocks that have a gate."""

    @abstractmethod
    def probability(self, block: int, hidden: Residual) -> PerToken:
        """That a token runs a block, from the residual that would enter it; float32."""

    @abstractmethod
    def open(self, block: int, hidden: Residual, seen: Pass) -> Gate:
        """Decide in a training pass."""

    def mix(
        self, block: int, before: Residual, after: Residual, gate: Gate, mlp: Residual | None
    ) -> Residual:
        """The residual after a block in training: as much of the block as its gate's weight."""
        weight = gate.weight[..., None].to(before.dtype)
        return before + weight * (after - before)

    @abstractmethod
    def cost(self, gates: Sequence[Gate], losses: PerRow, seen: Pass, target: float) -> Scalar:
        """What is added to the loss, before its weight.

        Args:
            gates: Of the governed blocks, in their order.
            losses: Of each row's answer, in nats.
            seen: The pass. Processes that share a batch sum their gradients, so what is a mean over
                the batch is one over all of theirs, as `Pass.total` makes it.
            target: Mean share of the governed blocks that is wanted; not all methods aim at one.
        """

    def place(self, block: int) -> int:
        """The place of a block among the governed."""
        return list(self.governed).index(block)


def mean_over_real(values: Float[Tensor, "batch tokens"], seen: Pass) -> Scalar:
    """The mean over tokens that are no pads, of all processes."""
    real = seen.is_real.float()
    return seen.total((values * real).sum()) / seen.total(real.sum())


def share_run(gates: Sequence[Gate]) -> Float[Tensor, "batch tokens"]:
    """The mean weight of each token over the governed blocks."""
    return torch.stack([gate.weight for gate in gates]).mean(0)


def straight_through(
    hard: Bool[Tensor, "batch tokens"], soft: Float[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    """One or zero, with the gradient of a soft gate."""
    return hard.float() + soft - soft.detach()


def need_gates(kind: type[GatedPart], resources: PolicyResources) -> Any:
    """The gates that a policy is made of, for this model.

    Raises:
        PolicyError: The model has none, or those of another method, depth or width.
    """
    part = need_part(kind, resources)
    if resources.backbone is not None:
        phrase, width = "for a hidden size of {} and the model has {}", part.config.hidden_size
        check_fits(kind.policy, phrase, width, resources.backbone.config.hidden_size)
    return part


@dataclass(slots=True)
class _State:
    """What a policy remembers during a pass."""

    new: NewTokens
    keep: Tensor | None = None
    earlier: Tensor | None = None
    """The residual that entered the gated block before."""


class GatedPolicy(OnlinePolicy):
    """Asks the gates at each governed block; whoever is more likely to run it than not does.

    Args:
        part: The gates.
        threshold: Runs where the probability is above it. 0 runs everything.
    """

    kind: ClassVar[type[GatedPart]]

    def __init__(self, part: GatedPart, threshold: float = 0.5) -> None:
        super().__init__(part.config.num_blocks)
        self.part, self.threshold = part, threshold
        self.governed = tuple(part.governed)
        self.hides_skipped = part.leaves == "mask"
        self.reads_mlp = part.reads_mlp

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> Policy:
        """Make it from its name, or from `NAME:THRESHOLD`."""
        part = need_gates(cls.kind, resources)
        meaning = "a number from 0 (every gated block runs) to 1 (none runs)"
        return cls(part, read_threshold(argument or "0.5", cls.name, meaning))

    def begin(self, new: NewTokens) -> _State:
        """What it remembers during a pass."""
        return _State(new)

    def keep(self, state: Any, block: int, hidden: LaneResidual) -> LaneMask:
        """Which lanes run a block, from the residual that would enter it."""
        if self.threshold == 0:
            keep = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        else:
            keep = self.probability(state, block, hidden) > self.threshold
            keep = keep | (state.new.position < self.part.sure_tokens)
        state.keep = keep
        return keep

    def probability(self, state: Any, block: int, hidden: Residual) -> Float[Tensor, " lanes"]:
        """That each lane runs a block."""
        return self.part.probability(block, hidden)

    def describe(self) -> str:
        """A few words for a summary line."""
        at = "" if self.threshold == 0.5 else f", threshold {self.threshold:g}"
        return f"{self.name}{at}"
