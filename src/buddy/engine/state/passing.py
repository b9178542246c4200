"""Keys and values of a pass that leaves none behind: what training attends to."""

from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from buddy.depth.plan import LaneSet
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.view import BlockKV, BlockView, Projector, lane_index

_Passing = tuple[NDArray[np.int64], Tensor]
"""Lanes that skip a block, and the residual of all."""


class PassingKV(BlockKV):
    """Keeps nothing beyond the pass, so that gradients flow; the rule is that of `project`.

    A token that skips a block has its keys and values projected from the residual that passed by,
    where a token of its sequence runs that block; a sequence that skips it whole costs nothing.

    Args:
        project: Makes keys and values from residuals.
        lanes: Of the pass: whole sequences.
        hides: The rule is that of `mask` instead.
    """

    def __init__(self, project: Projector, lanes: Lanes, *, hides: bool = False) -> None:
        self._project, self._lanes, self._hides = project, lanes, hides
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self._passing: _Passing | None = None

    def view(self, block: int, frame: Frame) -> BlockView:
        """What attention attends to, the same however often: a block may be computed again."""
        passing, self._passing = self._passing, None
        return BlockView(partial(self._merged, block, frame, passing))

    def visible(self, block: int, frame: Frame) -> Bool[Tensor, "rows 1 tokens slots"] | None:
        """Slots of tokens that run the block, under `mask`; None where there are no others."""
        if not self._hides or frame.is_all:
            return None
        row, column = frame.real
        seen = torch.zeros(frame.num_rows, frame.stop, dtype=torch.bool, device=frame.device)
        seen[row, frame.positions[row, column]] = True
        own = frame.positions[..., None] == torch.arange(frame.stop, device=frame.device)
        return (seen[:, None] | own)[:, None]

    def context(
        self, block: int, lanes: Lanes
    ) -> tuple[Float[Tensor, "sequences tokens width"], Float[Tensor, "sequences tokens width"]]:
        """Keys and values of a block that every lane ran, by sequence; of the last that ran."""
        keys, values = (part.transpose(1, 2).flatten(2) for part in self._seen[block])
        return keys.to(lanes.device), values.to(lanes.device)

    def skip(
        self,
        block: int,
        lanes: Lanes,
        chosen: LaneSet,
        hidden: Float[Tensor, "lanes hidden"],
        places: NDArray[np.int32],
    ) -> None:
        """Note what the lanes that run the block may have to see."""
        self._passing = None if chosen is None else (chosen, hidden)

    def fill(self, block: int, frame: Frame) -> None:
        """Nothing is left over from earlier passes."""

    def write(
        self, block: int, frame: Frame, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The frame's keys and values, and those of its sequences' lanes that skip the block."""
        return self.view(block, frame).write(keys, values)

    def _merged(
        self, block: int, frame: Frame, passing: _Passing | None, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._seen = {block: (keys, values)}  # those of all blocks would fill the memory
        if passing is None:
            return keys, values
        lanes, (chosen, hidden) = self._lanes, passing
        place = {row: at for at, row in enumerate(frame.row_numbers)}
        beside = chosen[np.isin(lanes.row[chosen], frame.row_numbers)]
        beside = beside[lanes.slot[beside] < frame.stop]
        if len(beside) == 0:
            return keys, values
        device = keys.device
        slots = lane_index(lanes.slot[beside], device)
        at = torch.tensor([place[row] for row in lanes.row[beside].tolist()], device=device)
        row, column = frame.real
        own = (row, frame.positions[row, column])
        residuals = hidden[lane_index(beside, hidden.device)].to(device)
        passed = self._project(block, residuals, slots)
        out = []
        for new, projected in zip((keys, values), passed, strict=True):
            merged = new.new_zeros(frame.num_rows, frame.stop, *new.shape[1::2])  # [n, S, H, d]
            merged = merged.index_put(own, new[row, :, column])
            out.append(merged.index_put((at, slots), projected.to(new.dtype)).transpose(1, 2))
        return out[0], out[1]
