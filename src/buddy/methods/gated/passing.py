"""The training pass of gated methods: every block is computed for every token, and gates mix."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.depth.plan import LaneSet
from buddy.depth.policy import Residual
from buddy.engine.state.lanes import Frame
from buddy.methods.gated.gates import Gate, GatedPart, Pass
from buddy.training.packing import PackedRun


class GatedRun(PackedRun):
    """A pass over whole sequences of one width in which gates get gradients.

    Args:
        *args: As for `PackedRun`.
        part: The gates.
        seen: What they may know.
        **kwargs: As for `PackedRun`.

    Attributes:
        gates: What they decided, by governed block, in order.
    """

    def __init__(self, *args: Any, part: GatedPart, seen: Pass, **kwargs: Any) -> None:
        super().__init__(*args, keeps_mlp=part.reads_mlp, **kwargs)
        self.part, self.seen = part, seen
        self.gates: list[Gate] = []
        self._hides: Bool[Tensor, "batch tokens"] | None = None

    def one_block(self, block: int, run: LaneSet, skip: LaneSet) -> None:
        """Run one block for all tokens, and mix its result as its gate says."""
        if block not in self.part.governed:
            super().one_block(block, run, skip)
            return
        before = self.hidden
        frame = self.lanes.whole
        gate = self.part.open(block, frame.spread(before), self.seen)
        self._hides = ~gate.keep if self.part.leaves == "mask" else None
        self.compute(block, frame)
        self._hides = None
        flat = Gate(gate.keep.flatten(), gate.weight.flatten())
        self.set_residual(self.part.mix(block, before, self.hidden, flat, self.mlp))
        self.gates.append(gate)

    def _mask(self, block: int, frame: Frame) -> Bool[Tensor, "rows 1 tokens slots"] | None:
        mask = super()._mask(block, frame)
        if self._hides is None:
            return mask
        full = frame.full_mask(self._backbone.windows[block]) if mask is None else mask
        own = torch.eye(full.shape[-1], dtype=torch.bool, device=full.device)
        return full & (~self._hides[:, None, None, :] | own)


def kept_by_row(gates: Sequence[Gate], num_blocks: int, governed: Sequence[int]) -> Tensor:
    """Who ran each block, [batch, tokens, blocks]; blocks without a gate are run by all."""
    keep = torch.stack([gate.keep for gate in gates], 2)
    whole = keep.new_ones(*keep.shape[:2], num_blocks)
    whole[..., list(governed)] = keep
    return whole


def last_hidden(run: GatedRun, num_blocks: int) -> Residual:
    """Run all blocks; the residual after the last."""
    run.blocks(range(num_blocks), None)
    return run.hidden.view(*run.seen.is_real.shape, -1)
