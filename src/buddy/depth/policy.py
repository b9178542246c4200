"""What a policy is, and how one is found by name."""

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.budget.blocks import check_spendable
from buddy.depth.prior import OnProgress, Prior
from buddy.errors import PolicyError
from buddy.records import read_record


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
        context = (None if held is None else held[chosen] for held in (self.keys, self.values))
        return Observation(self.token_ids[chosen], self.router_sees[chosen], *context)

    def first(self, tokens: int) -> "Observation":
        """The first new tokens of each sequence."""
        context = (None if held is None else held[:, :tokens] for held in (self.keys, self.values))
        return Observation(self.token_ids[:, :tokens], self.router_sees[:, :tokens], *context)


@runtime_checkable
class RouteState(Protocol):
    """What a policy remembers of each sequence, O(1) in its length."""

    def __len__(self) -> int:
        """How many sequences it is of."""
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
        """How many sequences it is of."""
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> "TensorState":
        """The state of the rows named, in that order."""
        held = (getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]
        return type(self)(*(tensor[rows.to(tensor.device)] for tensor in held))


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
    names = [one.name for one in fields(kind)]
    columns = [[getattr(state, name) for state in states] for name in names]
    if issubclass(kind, BatchSize):
        return BatchSize(sum(map(len, states)), columns[1][0])
    return cast(RouteState, kind(*map(torch.cat, columns)))


@runtime_checkable
class DepthPolicy(Protocol):
    """Scores blocks; `depth.select` spends the budget on the scores.

    Attributes:
        name: As in the registry.
        num_blocks: Blocks of the model it was made for.
        pinned: Blocks that run whatever the scores.
        context_layer: Blocks that have run when the policy is asked; 0 asks before the first.
    """

    name: str
    num_blocks: int
    pinned: Sequence[int]
    context_layer: int

    def observe(self, state: Any, seen: Observation) -> RouteState:
        """Take in new tokens; `state` is None for the first ones of a batch."""
        ...

    def scores(self, state: Any, blocks: Int[Tensor, " batch"]) -> Float[Tensor, "batch blocks"]:
        """Higher is kept; `blocks` is each row's budget, which most methods do not look at."""
        ...

    def describe(self) -> str:
        """A few words for a summary line."""
        ...


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


@runtime_checkable
class OnlinePolicy(Protocol):
    """Decides while a pass runs, before each block that it governs; it promises no budget.

    A policy that also changes what a governed block leaves in the residual has a method
    `adjust_output(state, block, before, run)`, which returns the residual of all lanes once the
    block has run. Its passes take the general path. One with a true `hides_skipped` is evaluated
    as under the KV policy `mask`, and others as under `project`, where a pass keeps no session.

    Attributes:
        name: As in the registry.
        num_blocks: Blocks of the model it was made for.
        governed: Blocks that it decides on; all others run.
    """

    name: str
    num_blocks: int
    governed: Sequence[int]

    def begin(self, new: NewTokens) -> Any:
        """What it remembers during a pass over these new tokens."""
        ...

    def keep(
        self, state: Any, block: int, hidden: Float[Tensor, "lanes hidden"]
    ) -> Bool[Tensor, " lanes"]:
        """Which lanes run a block, from the residual that would enter it."""
        ...

    def describe(self) -> str:
        """A few words for a summary line."""
        ...


Policy = DepthPolicy | OnlinePolicy
"""Whoever chooses blocks, before they run or while they do."""


def is_online(policy: Policy) -> bool:
    """Whether it decides while a pass runs; asked at every step, where `isinstance` is slow."""
    return hasattr(policy, "keep")


def adjusts_output(policy: Policy) -> bool:
    """Whether it changes what blocks leave in the residual, so that the general path runs it."""
    return hasattr(policy, "adjust_output")


def exits(policy: Policy) -> bool:
    """Whether any budget is an exit: the first blocks run, so that others may go on from there.

    Such a policy has an attribute `exits` that is True.
    """
    return bool(getattr(policy, "exits", False))


def prepare(policy: Policy, depths: Collection[int], on_progress: OnProgress | None = None) -> None:
    """Let a policy measure now what budgets below full depth will need of it.

    A policy that has something to measure has a method `prepare(on_progress)`. Without this it
    measures when it first scores blocks.

    Args:
        policy: Most need nothing.
        depths: What will be spent, in blocks.
        on_progress: Told how far a measurement is.

    Raises:
        BudgetError: A budget cannot be spent.
    """
    ready = getattr(policy, "prepare", None)
    if ready is not None and min(depths) < policy.num_blocks:
        check_spendable(depths, policy.num_blocks, cast(DepthPolicy, policy).pinned)
        ready(on_progress)


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
        """As many rows as are named."""
        return BatchSize(len(rows), self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResources:
    """What a model can offer to a policy that is made for it."""

    num_blocks: int
    """Blocks of the model."""
    fingerprint: str | None = None
    """Of the base model's weights: what was measured on another one is refused. None where it is
    not known."""
    prior: Prior | None = None
    """Importance of the middle blocks; None where none was measured, nor can be."""
    router: Any = None
    """A trained `routing.router.Router`; None where the model has none."""
    learned: Any = None
    """The trained part of a method, a `policies.learned.LearnedPart`; None where there is none."""
    backbone: Any = None
    """The model's `backbone.backbone.Backbone`, for policies that look at logits or change what a
    block leaves."""


BUILT_IN: Final = {
    "adainfer": "buddy.methods.adainfer.policy:AdaInferPolicy",
    "d-llm": "buddy.methods.d_llm.policy:DLLMPolicy",
    "dash": "buddy.methods.dash.policy:DashPolicy",
    "first": "buddy.methods.first.policy:FirstPolicy",
    "flexidepth": "buddy.methods.flexidepth.policy:FlexiDepthPolicy",
    "full": "buddy.policies.full:FullPolicy",
    "layerskip": "buddy.methods.layerskip.policy:LayerSkipPolicy",
    "mixture-of-depths": "buddy.methods.mixture_of_depths.policy:MixtureOfDepthsPolicy",
    "pudding": "buddy.methods.pudding.policy:PuddingPolicy",
    "random": "buddy.policies.random:RandomPolicy",
    "searched": "buddy.policies.searched:SearchedPolicy",
    "static": "buddy.policies.static:StaticPolicy",
    "routed": "buddy.policies.routed:RoutedPolicy",
}
"""Name -> `module:class`; imported only when asked for."""


def policy_names() -> list[str]:
    """Every policy that can be named, built in or registered under `buddy.policies`."""
    return sorted({*BUILT_IN, *entry_points(group="buddy.policies").names})


def split_label(text: str) -> tuple[str | None, str]:
    """Split `SPEC` or `LABEL=SPEC` into the label, None where there is none, and the spec.

    What begins with a policy's name and a colon is a spec: a path may have an = in it.
    """
    label, equals, spec = text.partition("=")
    if not equals or text.partition(":")[0] in policy_names():
        return None, text
    return label, spec


def build_policy(spec: str, resources: PolicyResources) -> Policy:
    """Make a policy from what a user wrote.

    Args:
        spec: `NAME` or `NAME:ARGUMENT`, as in `random:7` or `static:12,11,20`.
        resources: What the model offers.

    Raises:
        PolicyError: No such policy, or it cannot serve this model.
    """
    made_by, argument = _find(spec)
    made: Policy = made_by.from_spec(argument, resources)
    return made


def check_policy(spec: str) -> None:
    """Refuse what can serve no model at all.

    Raises:
        PolicyError: No such policy.
        ResultError: It is to be read from a record that cannot be read.
    """
    _, argument = _find(spec)
    if argument.endswith(".json"):
        read_record(Path(argument))


def _find(spec: str) -> tuple[Any, str]:
    """The class that a spec names, and the argument for it."""
    name, _, argument = spec.partition(":")
    target = BUILT_IN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        return getattr(importlib.import_module(module), attribute), argument
    found = entry_points(group="buddy.policies", name=name)
    if not found:
        raise PolicyError(f"no policy {name!r}: expected one of {', '.join(policy_names())}")
    return next(iter(found)).load(), argument
