"""What a policy is: two base classes, what they are shown, and what they remember."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.budget.blocks import check_spendable
from buddy.depth.prior import OnProgress, Prior
from buddy.errors import BudgetError, PolicyError

BlockScores = Float[Tensor, "batch blocks"]
RowBudgets = Int[Tensor, " batch"]
"""Blocks that each row may run."""
Residual = Float[Tensor, "*shape hidden"]
"""The residual of lanes, or of the tokens of a batch."""
LaneResidual = Float[Tensor, "lanes hidden"]
PerToken = Float[Tensor, "*shape"]
LaneMask = Bool[Tensor, " lanes"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy may look at when new tokens arrive.

    Attributes:
        token_ids: New tokens, by sequence.
        router_sees: False for pads, and for an answer that the route may not see.
        keys: New tokens' keys in the context layer, as cached, KV heads flattened.
        values: The same for values. Both are None for a policy with `context_layer` 0.
    """

    token_ids: Int[Tensor, "batch tokens"]
    router_sees: Bool[Tensor, "batch tokens"]
    keys: Float[Tensor, "batch tokens width"] | None = None
    values: Float[Tensor, "batch tokens width"] | None = None

    def select_rows(self, rows: Sequence[int]) -> "Observation":
        """What is new of the sequences named, in that order."""
        chosen = list(rows)
        context = (None if part is None else part[chosen] for part in (self.keys, self.values))
        return Observation(self.token_ids[chosen], self.router_sees[chosen], *context)

    def first(self, tokens: int) -> "Observation":
        """The first new tokens of each sequence."""
        context = (None if part is None else part[:, :tokens] for part in (self.keys, self.values))
        return Observation(self.token_ids[:, :tokens], self.router_sees[:, :tokens], *context)


@runtime_checkable
class RouteState(Protocol):
    """What a policy remembers of each sequence, O(1) in its length."""

    def __len__(self) -> int:
        """The number of sequences."""
        ...

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> "RouteState":
        """The state of the rows named, in that order."""
        ...


def check_state(state: object, kinds: type | tuple[type, ...], policy: str) -> None:
    """Refuse a state that another policy left in a session; None is the start of one.

    Raises:
        PolicyError: It is of no such kind.
    """
    if state is not None and not isinstance(state, kinds):
        raise PolicyError(
            f"this session was begun under another policy, and {policy} cannot go on from what it "
            "noted of the prompts: begin a new session"
        )


class TensorState:
    """A route state whose fields are all tensors, or None, with a row for each sequence."""

    __slots__ = ()

    def __len__(self) -> int:
        """The number of sequences."""
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> "TensorState":
        """The state of the rows named, in that order."""
        tensors = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(part[rows.to(part.device, non_blocking=True)] for part in tensors))


def join_states(states: Sequence[RouteState]) -> RouteState:
    """One state of the sequences of several, side by side.

    Raises:
        PolicyError: They are of different kinds, or of one that cannot be joined.
    """
    kinds = {type(state) for state in states}
    kind = kinds.pop()
    if kinds or not is_dataclass(kind):
        raise PolicyError(
            f"route states of kind {kind.__name__} cannot be joined: sequences of one step must "
            "have been routed by the same policy, whose state is a dataclass of tensors"
        )
    names = [field.name for field in fields(kind)]
    columns = [[getattr(state, name) for state in states] for name in names]
    if issubclass(kind, BatchSize):
        return BatchSize(sum(map(len, states)), columns[1][0])
    return cast(RouteState, kind(*map(torch.cat, columns)))


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The state of a policy that remembers nothing: how many rows there are, and where."""

    rows: int
    device: torch.device

    @classmethod
    def of(cls, seen: Observation) -> "BatchSize":
        """Read it from what arrived."""
        return cls(seen.token_ids.shape[0], seen.token_ids.device)

    def __len__(self) -> int:
        return self.rows

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> "BatchSize":
        """The size of a batch of the rows named."""
        return BatchSize(len(rows), self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResources:
    """What a model can offer to a policy that is made for it."""

    num_blocks: int
    """Blocks of the model."""
    fingerprint: str | None = None
    """The fingerprint of the base model's weights: what was measured on another model is refused.
    None where it is not known."""
    prior: Prior | None = None
    """Importance of the middle blocks; None where none was measured, nor can be."""
    router: Any = None
    """A trained `routing.router.Router`; None where the model has none."""
    learned: Any = None
    """The trained part of a method, a `policies.learned.LearnedPart`; None where there is none."""
    backbone: Any = None
    """The model's `backbone.backbone.Backbone`, for policies that look at logits or change what a
    block leaves."""


class BlockPolicy(ABC):
    """What all policies have; inherit `DepthPolicy` or `OnlinePolicy`, not this.

    Args:
        num_blocks: Blocks of the model that it is made for.

    Attributes:
        name: As in the registry.
        num_blocks: As given.
        pinned: Blocks that run whatever the scores.
        context_layer: Blocks that have run when the policy is asked; 0 asks before the first.
        is_online: It decides while a pass runs, and keeps no budget.
        exits: Any budget is an exit: the first blocks run, so that others may go on from there.
        hides_skipped: Passes without a session follow the KV policy `mask`, not `project`.
        adjusts_output: It changes what blocks leave in the residual, so the general path runs it.
        reads_mlp: To do so it reads what a block's MLP adds, `run.mlp`.
    """

    name: str
    num_blocks: int
    pinned: Sequence[int] = (0, -1)
    context_layer: int = 0
    is_online: ClassVar[bool]
    exits: ClassVar[bool] = False
    hides_skipped: bool = False
    adjusts_output: ClassVar[bool] = False
    reads_mlp: bool = False

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "Policy":
        """Make it from what a user wrote: `NAME`, or `NAME:ARGUMENT` where a method takes one.

        Raises:
            PolicyError: The argument is not understood, or the model lacks what the policy needs.
        """
        if argument:
            raise PolicyError(f"policy {cls.name} takes no argument, got {argument!r}")
        return cast(Policy, cls(resources.num_blocks))

    @property
    def num_pinned(self) -> int:
        """Blocks that run whatever the budget, at least one: the smallest that can be spent."""
        return max(1, len({block % self.num_blocks for block in self.pinned}))

    @property
    def plans_ahead(self) -> bool:
        """Whether the plan of a prompt is known before any block has run."""
        return not self.is_online and self.context_layer == 0

    def check_spendable(self, depths: Collection[int]) -> None:
        """Refuse budgets, in blocks, that it cannot keep.

        Raises:
            BudgetError: One is below what always runs, or no budget is kept.
        """
        check_spendable(depths, self.num_blocks, self.pinned)

    @abstractmethod
    def describe(self) -> str:
        """A few words for a summary line."""

    def prepare(self, on_progress: OnProgress | None = None) -> None:  # noqa: B027  # a hook
        """Measure now what budgets below full depth will need; most policies need nothing.

        A policy that is not prepared measures when it first scores blocks.

        Args:
            on_progress: Told how far a measurement is.
        """

    def prepare_for(self, depths: Collection[int], on_progress: OnProgress | None = None) -> None:
        """Check these budgets, in blocks, and `prepare` if one is below full depth.

        Raises:
            BudgetError: One cannot be spent.
        """
        if min(depths) < self.num_blocks:
            self.check_spendable(depths)
            self.prepare(on_progress)


class DepthPolicy(BlockPolicy):
    """Scores blocks; `depth.select` spends the budget on the scores."""

    is_online = False

    def observe(self, state: Any, seen: Observation) -> RouteState:
        """Take in new tokens; by default only the size of the batch is remembered.

        Args:
            state: What was remembered before; None for the first tokens of a batch.
            seen: The new tokens.
        """
        return BatchSize.of(seen)

    @abstractmethod
    def scores(self, state: Any, blocks: RowBudgets) -> BlockScores:
        """Higher is kept; `blocks` is each row's budget, which most methods do not look at."""


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What an online policy is told of the new tokens of a pass, before the first block.

    Attributes:
        sequence: By lane, the place of its sequence among those of the pass.
        position: By lane, in its sequence.
        router_sees: By lane; False in an answer that the route may not see.
        last_runs: By sequence, what its last token ran, [blocks]; None for a new one.
    """

    sequence: Int[Tensor, " lanes"]
    position: Int[Tensor, " lanes"]
    router_sees: Bool[Tensor, " lanes"]
    last_runs: Sequence[NDArray[np.bool_] | None]

    def __len__(self) -> int:
        return len(self.sequence)


class OnlinePolicy(BlockPolicy):
    """Decides while a pass runs, before each block that it governs; it promises no budget.

    Attributes:
        governed: Blocks that it decides on; all others run.
    """

    is_online = True
    governed: Sequence[int]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.adjusts_output = cls.adjust_output is not OnlinePolicy.adjust_output

    @property
    def pinned(self) -> Sequence[int]:  # type: ignore[override]  # none is anybody's to set
        """All blocks: it keeps no budget below full depth."""
        return range(self.num_blocks)

    def check_spendable(self, depths: Collection[int]) -> None:
        """Refuse any budget below full depth."""
        below = next((blocks for blocks in depths if blocks != self.num_blocks), None)
        if below is not None:
            raise BudgetError(
                f"policy {self.name!r} decides while it runs and keeps no budget, and the budget "
                f"is {below} of {self.num_blocks} blocks: leave the budget out"
            )

    @abstractmethod
    def begin(self, new: NewTokens) -> Any:
        """What it remembers during a pass over these new tokens."""

    @abstractmethod
    def keep(self, state: Any, block: int, hidden: LaneResidual) -> LaneMask:
        """Which lanes run a block, from the residual that would enter it."""

    def adjust_output(self, state: Any, block: int, before: LaneResidual, run: Any) -> LaneResidual:
        """The residual of all lanes once a governed block has run; by default as it was left.

        Passes of a policy that overrides this take the general path.

        Args:
            state: As `begin` made it.
            block: That has run.
            before: The residual that entered it.
            run: The pass; `run.hidden` is the residual now.
        """
        after: Tensor = run.hidden
        return after


Policy = DepthPolicy | OnlinePolicy
"""Whoever chooses blocks, before they run or while they do."""


def check_is_policy(policy: object) -> Policy:
    """The policy, if it is one.

    Raises:
        PolicyError: Its class has no base of ours, as classes of older versions had none.
    """
    if isinstance(policy, DepthPolicy | OnlinePolicy):
        return policy
    raise PolicyError(
        f"{type(policy).__name__} is no policy: let the class inherit DepthPolicy of "
        "buddy.depth.policy, which scores blocks, or OnlinePolicy, which decides while they run "
        "(and whose method `settle` is called `adjust_output` now)"
    )
