"""Methods with a gate at each block, which reads the residual of every token.

One file a method says what its gates look like, what they leave, and how they are trained; what is
the same for all stands here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.depth.policy import NewTokens, PolicyResources
from buddy.errors import PolicyError
from buddy.policies.learned import LearnedPart, need_part


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

    def total(self, own: Float[Tensor, ""]) -> Float[Tensor, ""]:
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
    weight: Float[Tensor, "*shape"]
    extra: Float[Tensor, ""] | None = None


class GatedPart(LearnedPart, ABC):
    """The gates of a method.

    Attributes:
        leaves: What a token that skips a block leaves in its cache, as `kv_policy` names it.
        reads_mlp: The method weighs the output of a block's MLP apart.
        sure_tokens: The first tokens of a sequence that run everything.
    """

    leaves: ClassVar[Literal["mask", "lazy"]] = "lazy"
    reads_mlp: ClassVar[bool] = False
    sure_tokens: ClassVar[int] = 0

    @property
    @abstractmethod
    def governed(self) -> Sequence[int]:
        """Blocks that have a gate."""

    @abstractmethod
    def probability(
        self, block: int, hidden: Float[Tensor, "*shape hidden"]
    ) -> Float[Tensor, "*shape"]:
        """That a token runs a block, from the residual that would enter it; float32."""

    @abstractmethod
    def open(self, block: int, hidden: Float[Tensor, "batch tokens hidden"], seen: Pass) -> Gate:
        """Decide in a training pass."""

    def mix(
        self,
        block: int,
        before: Float[Tensor, "*shape hidden"],
        after: Float[Tensor, "*shape hidden"],
        gate: Gate,
        mlp: Float[Tensor, "*shape hidden"] | None,
    ) -> Float[Tensor, "*shape hidden"]:
        """The residual after a block in training: as much of the block as its gate's weight."""
        weight = gate.weight[..., None].to(before.dtype)
        return before + weight * (after - before)

    @abstractmethod
    def cost(
        self,
        gates: Sequence[Gate],
        losses: Float[Tensor, " batch"],
        seen: Pass,
        target: float,
    ) -> Float[Tensor, ""]:
        """What is added to the loss, before its weight.

        Args:
            gates: Of the governed blocks, in their order.
            losses: Of each row's answer, in nats.
            seen: The pass. Processes that share a batch sum their gradients, so what is a mean over
                the batch is one over all of theirs, as `Pass.total` makes it.
            target: Mean share of the governed blocks that is wanted; not all methods aim at one.
        """

    def place(self, block: int) -> int:
        """Of a block, among the governed."""
        return list(self.governed).index(block)


def mean_over_real(values: Float[Tensor, "batch tokens"], seen: Pass) -> Float[Tensor, ""]:
    """The mean over tokens that are no pads, of all processes."""
    real = seen.is_real.float()
    return seen.total((values * real).sum()) / seen.total(real.sum())


def share_run(gates: Sequence[Gate]) -> Float[Tensor, "batch tokens"]:
    """Of each token, the mean weight over the governed blocks."""
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
    part = need_part(kind, resources.learned, resources.num_blocks)
    backbone = resources.backbone
    width = part.config.hidden_size if backbone is None else backbone.config.hidden_size
    if width != part.config.hidden_size:
        raise PolicyError(
            f"policy {kind.policy!r} was trained for a hidden size of {part.config.hidden_size} "
            f"and the model has {width}: use one trained for this model"
        )
    return part


def read_threshold(argument: str, policy: str) -> float:
    """The probability above which a token runs a block, from `POLICY:THRESHOLD`; 0.5 by default.

    Raises:
        PolicyError: It is no number between 0 and 1.
    """
    try:
        threshold = float(argument or 0.5)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise PolicyError(
            f"policy {policy}:THRESHOLD takes a number from 0 (every gated block runs) to 1 (none "
            f"runs), as in {policy}:0.4, got {argument[:80]!r}"
        )
    return threshold


@dataclass(slots=True)
class _State:
    """Of one pass."""

    new: NewTokens
    keep: Tensor | None = None
    earlier: Tensor | None = None
    """The residual that entered the gated block before."""


class GatedPolicy:
    """Asks the gates at each governed block; whoever is more likely to run it than not does.

    Args:
        part: The gates.
        threshold: Runs where the probability is above it. 0 runs everything.
    """

    kind: ClassVar[type[GatedPart]]
    name: str

    def __init__(self, part: GatedPart, threshold: float = 0.5) -> None:
        self.part, self.threshold = part, threshold
        self.num_blocks = part.config.num_blocks
        self.governed = tuple(part.governed)
        self.hides_skipped = part.leaves == "mask"

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "GatedPolicy":
        """Make it from its name, or from `NAME:THRESHOLD`."""
        part = need_gates(cls.kind, resources)
        return cls(part, read_threshold(argument, cls.kind.policy))

    def begin(self, new: NewTokens) -> _State:
        """What it remembers during a pass."""
        return _State(new)

    def keep(
        self, state: Any, block: int, hidden: Float[Tensor, "lanes hidden"]
    ) -> Bool[Tensor, " lanes"]:
        """Which lanes run a block, from the residual that would enter it."""
        if self.threshold == 0:
            keep = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        else:
            keep = self.probability(state, block, hidden) > self.threshold
            keep = keep | (state.new.position < self.part.sure_tokens)
        state.keep = keep
        return keep

    def probability(
        self, state: Any, block: int, hidden: Float[Tensor, "lanes hidden"]
    ) -> Float[Tensor, " lanes"]:
        """That each lane runs a block."""
        return self.part.probability(block, hidden)

    def describe(self) -> str:
        """As shown in a summary line."""
        at = "" if self.threshold == 0.5 else f", threshold {self.threshold:g}"
        return f"{self.name}{at}"
