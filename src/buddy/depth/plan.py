"""A plan: which blocks run, for each lane. A lane is one new token of one sequence."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

LaneSet = NDArray[np.int64] | None
"""Lanes by number, ascending; None stands for all of them."""

NO_LANES: NDArray[np.int64] = np.empty(0, np.int64)


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Values of the host on a device; the host waits neither for the copy nor for what is queued.

    CUDA has read memory that is not pinned when the call returns.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)


class BlockLanes(NamedTuple):
    """How the lanes of a pass divide at one block."""

    run: LaneSet
    skip: LaneSet


class DepthPlan:
    """Which blocks run, per lane; a plan for a whole prompt is one whose lanes agree.

    Args:
        mask: [lanes, blocks], True = run.
    """

    def __init__(self, mask: Bool[Tensor, "lanes blocks"]) -> None:
        self.__dict__["mask"] = mask
        self.device = mask.device

    @classmethod
    def of_lanes(
        cls, lanes: Sequence[Sequence[bool]] | NDArray[np.bool_], device: torch.device | str = "cpu"
    ) -> "DepthPlan":
        """A plan that the host knows: it need not be read back from the device."""
        plan = cls.__new__(cls)
        plan.device = torch.device(device)
        plan.__dict__["host"] = np.ascontiguousarray(lanes, dtype=np.bool_)
        return plan

    @classmethod
    def full(cls, lanes: int, num_blocks: int, device: torch.device | str = "cpu") -> "DepthPlan":
        """Every lane runs every block."""
        return cls.of_lanes(np.ones((lanes, num_blocks), np.bool_), device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DepthPlan) and bool(np.array_equal(self.host, other.host))

    def __hash__(self) -> int:
        return hash(self.executed_sets)

    @cached_property
    def mask(self) -> Bool[Tensor, "lanes blocks"]:
        """True = run, on the device."""
        return on_device(self.host, self.device)

    @cached_property
    def host(self) -> NDArray[np.bool_]:
        """The mask on the host, where a plan is carried out, [lanes, blocks]."""
        return np.ascontiguousarray(self.mask.cpu().numpy())

    @property
    def depth(self) -> Int[Tensor, " lanes"]:
        """Blocks that each lane is to run."""
        return torch.from_numpy(self.host.sum(1))

    @cached_property
    def executed_sets(self) -> tuple[tuple[int, ...], ...]:
        """Each lane's executed blocks, ascending: hashable, to count and compare plans."""
        return tuple(tuple(np.flatnonzero(lane).tolist()) for lane in self.host)

    @cached_property
    def by_block(self) -> tuple[BlockLanes, ...]:
        """The lanes that run each block, and those that skip it."""
        return tuple(map(_divide, self.host.T))

    def repeat(self, counts: Sequence[int]) -> "DepthPlan":
        """The plan in which each lane stands as often as `counts` says: rows become lanes."""
        if all(count == 1 for count in counts):
            return self
        return DepthPlan.of_lanes(np.repeat(self.host, counts, axis=0), self.device)

    def select(self, lanes: Sequence[int] | NDArray[np.int64]) -> "DepthPlan":
        """The plan of the lanes named, in that order."""
        return DepthPlan.of_lanes(self.host[lanes], self.device)


def _divide(block_mask: NDArray[np.bool_]) -> BlockLanes:
    if block_mask.all():
        return BlockLanes(None, NO_LANES)
    if not block_mask.any():
        return BlockLanes(NO_LANES, None)
    return BlockLanes(np.flatnonzero(block_mask), np.flatnonzero(~block_mask))
