"""What every kind of cache shares: how attention sees one block of it, and how it is indexed."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import LaneSet, on_device
from buddy.engine.state.lanes import Frame, Lanes

Projector = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(block, residuals [N, D], positions [N]) -> keys and values [N, heads, head]."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block's cache in a pass, under the name by which attention modules call it.

    Attributes:
        write: Stores new keys and values; returns all that there are to attend to.
    """

    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [sequences, heads, tokens, head]; return all to attend to."""
        return self.write(keys, values)


class BlockKV(ABC):
    """Keys and values of every block during a pass, and what a lane leaves that skips one."""

    def view(self, block: int, frame: Frame) -> BlockView:
        """What attention writes to and reads from, when the lanes of a frame run `block`."""
        return BlockView(partial(self.write, block, frame))

    @abstractmethod
    def write(
        self, block: int, frame: Frame, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store the frame's keys and values; return all that its sequences may attend to."""

    @abstractmethod
    def visible(self, block: int, frame: Frame) -> Bool[Tensor, "rows 1 tokens slots"] | None:
        """Slots that each query of the frame may see; None where it may see all."""

    @abstractmethod
    def context(
        self, block: int, lanes: Lanes
    ) -> tuple[Float[Tensor, "sequences tokens width"], Float[Tensor, "sequences tokens width"]]:
        """Keys and values that this pass put into a block that every lane ran, by sequence."""

    @abstractmethod
    def skip(
        self,
        block: int,
        lanes: Lanes,
        chosen: LaneSet,
        hidden: Float[Tensor, "lanes hidden"],
        places: NDArray[np.int32],
    ) -> None:
        """Note that `chosen` skip `block` in this pass.

        Args:
            block: That is skipped.
            lanes: Of the pass.
            chosen: Some of them.
            hidden: The residual of all lanes.
            places: By lane, where its residual is stored since its last change, or -1; updated.
        """

    @abstractmethod
    def fill(self, block: int, frame: Frame) -> None:
        """Close the holes that the block is about to see in the rows of a frame."""


def lane_index(values: NDArray[np.integer], device: torch.device) -> Tensor:
    """Numbers of lanes, rows or slots, as tensors are indexed by them."""
    return on_device(values.astype(np.int64), device)
