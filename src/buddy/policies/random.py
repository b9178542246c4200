"""Random blocks: the baseline that any router has to beat."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.depth.policy import (
    BlockScores,
    DepthPolicy,
    Observation,
    PolicyResources,
    RowBudgets,
    TensorState,
    check_state,
)
from buddy.errors import PolicyError

_MULTIPLIERS = (0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D, 0x27D4EB2F165667C5)


@dataclass(frozen=True, slots=True)
class Fingerprint(TensorState):
    """A hash of each row's tokens so far, and how many they are."""

    value: Int[Tensor, " batch"]
    count: Int[Tensor, " batch"]


def _mix(x: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Scramble 64-bit integers; arithmetic wraps around, as a hash wants."""
    x = (x ^ (x >> 31)) * _MULTIPLIERS[1]
    x = (x ^ (x >> 29)) * _MULTIPLIERS[2]
    return x ^ (x >> 32)


class RandomPolicy(DepthPolicy):
    """Uniform scores, a function of the seed and of the row's own tokens so far.

    So a row's plans do not depend on its batch, its padding or the run, and change at every step.
    """

    name = "random"

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        super().__init__(num_blocks)
        self.seed = seed

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "RandomPolicy":
        """Make it from `random` or `random:SEED`."""
        text = argument or "0"
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if not (is_number and int(text) < 2**63):
            raise PolicyError(
                f"policy random:SEED takes a whole number below 2**63, got {argument[:80]!r}"
            )
        return cls(resources.num_blocks, int(text))

    def observe(self, state: Any, seen: Observation) -> Fingerprint:
        """Fold new tokens into the fingerprint, each with its place among the counted ones."""
        check_state(state, Fingerprint, self.name)
        place = seen.router_sees.long().cumsum(1)  # [B, T]
        if state is None:
            zeros = place.new_zeros(len(place))
            state = Fingerprint(zeros, zeros)
        place = place + state.count[:, None]
        hashed = _mix(seen.token_ids.long() * _MULTIPLIERS[0] + place) * seen.router_sees
        return Fingerprint(state.value + hashed.sum(1), state.count + seen.router_sees.sum(1))

    def scores(self, state: Fingerprint, blocks: RowBudgets) -> BlockScores:
        """Uniform in [0, 1)."""
        blocks = torch.arange(1, self.num_blocks + 1, device=state.value.device)
        mixed = _mix(_mix(state.value + self.seed)[:, None] + blocks * _MULTIPLIERS[0])
        return ((mixed >> 8) & 0xFFFFFF).float() / 2**24

    def describe(self) -> str:
        """A few words for a summary line."""
        return f"random, seed {self.seed}"
