"""Passes over whole examples without padding: attention alone sees rectangles, if anything does.

Rows of a batch differ in length, and tokens of a row in depth: as rectangles, about a fifth of what
is computed would be pads.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone, Rotary
from buddy.backbone.depth_scales import depths_known
from buddy.engine.executors.blocks import BlockRun
from buddy.engine.feed import Feed
from buddy.engine.probe import GATHER_SCATTER, piece
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.passing import PassingKV
from buddy.training.attention import Packing, attends_flat, is_grouped, packed
from buddy.training.batches import Batch

_ROUND: Final = 128
"""Tokens are filled up to a multiple of this: matrix products are prepared once for each shape."""


@dataclass(frozen=True, slots=True)
class PackedView:
    """Takes keys and values of tokens side by side to a view that knows rectangles.

    Attributes:
        kv: That view; None to keep nothing.
        packing: Places of the tokens.
        is_flat: Hand back the keys and values as they came: no token sees others.
    """

    kv: Any
    packing: Packing
    is_flat: bool

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Update as by `kv.update`, with keys and values [1, heads, tokens, head]."""
        if self.is_flat and self.kv is None:
            return keys, values
        laid = [self.packing.spread(flat[0].transpose(0, 1)) for flat in (keys, values)]
        rectangles = laid[0].transpose(1, 2), laid[1].transpose(1, 2)
        if self.kv is None:
            return rectangles
        cached: tuple[Tensor, Tensor] = self.kv.update(*rectangles, layer_idx, *args, **kwargs)
        return (keys, values) if self.is_flat else cached


class PackedRun(BlockRun):
    """A pass that computes no pads, where attention is that of `training.attention`.

    What is in a pad's residual does not matter: pads stand right, and no token sees them.

    Args:
        *args: As for `BlockRun`.
        is_pad: By lane.
        **kwargs: As for `BlockRun`.
    """

    def __init__(self, *args: Any, is_pad: Bool[Tensor, " lanes"], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_pad = is_pad
        self._packings: dict[int, tuple[Packing, Rotary] | None] = {}

    def run_frame(self, block: int, frame: Frame, kv: Any) -> Float[Tensor, "rows tokens hidden"]:
        """What a block makes of the lanes of a frame; zero at pads."""
        packed_frame = self._packing(frame)
        if packed_frame is None:
            return super().run_frame(block, frame, kv)
        packing, rotary = packed_frame
        mask = self._mask(block, frame)
        # Then a token sees those before it of its own sequence, and they all run the block.
        is_flat = packing.ends is not None and mask is None and frame.is_prefix
        with piece(GATHER_SCATTER):
            hidden = self.hidden.index_select(0, packing.lanes)
        shares = None
        if self._depth_shares is not None:
            shares = self._depth_shares.index_select(0, packing.lanes)[None]
        with packed(packing, is_flat=is_flat), depths_known(shares):
            out = self._backbone.run_block(
                block,
                hidden[None],
                mask,
                packing.positions[None],
                rotary,
                PackedView(kv, packing, is_flat),
            )
        with piece(GATHER_SCATTER):
            return packing.spread(out[0])

    def _rectangle(self, frame: Frame, values: Tensor) -> Tensor:
        packed_frame = self._packing(frame)
        return values if packed_frame is None else packed_frame[0].spread(values[0])

    def _packing(self, frame: Frame) -> tuple[Packing, Rotary] | None:
        """Tokens of a frame, and their angles; None where the rectangle is as good."""
        if id(frame) not in self._packings:  # frames live as long as this pass
            self._packings[id(frame)] = self._pack(frame) if is_grouped(self._backbone) else None
        return self._packings[id(frame)]

    def _pack(self, frame: Frame) -> tuple[Packing, Rotary] | None:
        row, column = frame.real
        places = row * frame.width + column
        places = places[~self._is_pad[frame.index[places]]]
        num = len(places)
        filled = nn.functional.pad(places, (0, -num % _ROUND))
        if num == 0 or len(filled) >= frame.num_rows * frame.width:
            return None
        positions = frame.positions.flatten()[filled]
        ends = None
        if attends_flat(self._backbone):
            bounds = torch.arange(frame.num_rows + 1, device=places.device) * frame.width
            ends = torch.searchsorted(places, bounds, out_int32=True)
            if len(filled) > num:
                ends = nn.functional.pad(ends, (0, 1), value=len(filled))
        packing = Packing(
            frame.index[filled], filled, positions, num, (frame.num_rows, frame.width), ends
        )
        return packing, self._backbone.rotary(self.hidden[None], positions[None])


SomeRun = TypeVar("SomeRun", bound=PackedRun)


def begin_pass(kind: type[SomeRun], backbone: Backbone, batch: Batch, **own: Any) -> SomeRun:
    """A run over prompts and answers whose route sees the prompts alone.

    Pads stand right: under causal attention no token sees them, so they run along as tokens do, or
    are not computed.

    Args:
        kind: Of the run.
        backbone: Runs the blocks.
        batch: Prompts and answers.
        **own: What this kind takes beside.
    """
    feed = Feed.of_batch(batch.token_ids, router_sees=batch.is_prompt)
    lanes = Lanes.prompts(feed.counts, feed.token_ids.device)
    kv, is_pad = PassingKV(backbone.project, lanes), batch.is_pad.flatten()
    return kind(backbone, lanes, kv, feed.token_ids, feed.router_sees, is_pad=is_pad, **own)
