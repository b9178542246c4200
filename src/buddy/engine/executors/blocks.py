"""The general path: the Hugging Face modules, a block at a time, for the lanes that run it.

It runs every family on every device, and is the reference of compiled code and of CUDA graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone, Rotary
from buddy.backbone.depth_scales import depths_known
from buddy.depth.plan import NO_LANES, DepthPlan, LaneSet
from buddy.depth.policy import Observation
from buddy.engine.fork_guard import check_threads
from buddy.engine.probe import BLOCKS, GATHER_SCATTER, KV_FILL, piece
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.skipped import NOBODY
from buddy.engine.state.view import BlockKV


class PassRun:
    """A pass on its way through the blocks, as policies see it.

    Args:
        lanes: Of the pass.
        kv: Where keys and values go, and what a skipped block leaves.
        token_ids: By lane.
        router_sees: Lanes that the route may see; None = all.
    """

    def __init__(
        self,
        lanes: Lanes,
        kv: BlockKV,
        token_ids: Int[Tensor, " lanes"],
        router_sees: Bool[Tensor, " lanes"] | None = None,
    ) -> None:
        self.lanes = lanes
        self._kv, self._token_ids, self._router_sees = kv, token_ids, router_sees

    def observe(self, context_layer: int) -> Observation:
        """The new tokens, and what the 1-based context layer cached of them; 0 = no layer."""
        lanes, sees = self.lanes, self._router_sees
        if context_layer == 0 and len(set(lanes.counts)) == 1:  # no more work than need be
            ids = self._token_ids.view(len(lanes.rows), -1)
            seen = torch.ones_like(ids, dtype=torch.bool)
            return Observation(ids, seen if sees is None else sees.view(ids.shape))
        frame = lanes.whole
        ids = frame.spread(self._token_ids)
        seen = torch.ones_like(ids, dtype=torch.bool) if sees is None else frame.spread(sees)
        if frame.pads is not None:
            seen = seen & ~frame.pads
        if context_layer == 0:
            return Observation(ids, seen)
        return Observation(ids, seen, *self._kv.context(context_layer - 1, lanes))


class LaneRun(PassRun, ABC):
    """A pass that runs one block at a time; kinds differ in how a block is computed.

    Args:
        lanes: Of the pass.
        kv: Where keys and values go, and what a skipped block leaves.
        token_ids: By lane.
        router_sees: Lanes that the route may see; None = all.
        spread: Where each block lies; None = all lie where the tokens are.
    """

    def __init__(
        self,
        lanes: Lanes,
        kv: BlockKV,
        token_ids: Int[Tensor, " lanes"],
        router_sees: Bool[Tensor, " lanes"] | None,
        spread: Sequence[torch.device] | None = None,
    ) -> None:
        super().__init__(lanes, kv, token_ids, router_sees)
        self._spread = spread
        self._places = np.full(lanes.num, NOBODY, np.int32)
        self._frames: dict[tuple[torch.device, bytes], Frame] = {}
        self._executed = np.zeros(lanes.num, np.int64)

    @abstractmethod
    def residual(self, block: int) -> Float[Tensor, "lanes hidden"]:
        """The residual that enters a block, which is the next one."""

    @abstractmethod
    def compute(self, block: int, frame: Frame) -> None:
        """Run a block for the lanes of a frame; their holes in it are closed."""

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""
        for block in blocks:
            run, skip = (None, NO_LANES) if plan is None else plan.by_block[block]
            self.one_block(block, run, skip)

    def one_block(self, block: int, run: LaneSet, skip: LaneSet) -> None:
        """Run one block for some lanes; the others skip it."""
        if skip is None or len(skip):
            with piece(KV_FILL):
                self._kv.skip(block, self.lanes, skip, self.residual(block), self._places)
        if run is not None and len(run) == 0:
            return
        frame = self.frame(run, block)
        with piece(KV_FILL):
            self._kv.fill(block, frame)
        self.compute(block, frame)
        ran = slice(None) if run is None else run
        self._executed[ran] += 1
        self._places[ran] = NOBODY  # what they ran has changed their residual

    def frame(self, chosen: LaneSet, block: int) -> Frame:
        """The rectangle of these lanes where a block lies, made once for each device."""
        lanes = self.lanes if self._spread is None else self.lanes.at(self._spread[block])
        if chosen is None:
            return lanes.whole
        key = lanes.device, chosen.tobytes()
        if key not in self._frames:
            self._frames[key] = Frame(lanes, chosen)
        return self._frames[key]

    def executed(self) -> Int[Tensor, " lanes"]:
        """Blocks that each lane ran, counted as they ran."""
        return torch.from_numpy(self._executed)


class BlockRun(LaneRun):
    """The residual of one pass, on its way through the blocks.

    At each block the lanes that run it are laid out as a rectangle, run and put back; lanes that
    skip it are not computed. Where all lanes run and no sequence is shorter, nothing is copied.
    Updates are out of place: the residual that skipped a block may still be needed.

    Of a model on several devices, the residual is moved when the next block that runs lies
    elsewhere, and comes home to the tokens when the blocks of a segment have run. A block that is
    skipped moves nothing, but for `project`, which computes keys and values there.

    Args:
        backbone: Runs the blocks.
        lanes: Of the pass.
        kv: Where keys and values go, and what a skipped block leaves.
        token_ids: By lane.
        router_sees: Lanes that the route may see; None = all.
        keeps_mlp: Keep what a block's MLP adds to the residual.

    Attributes:
        mlp: That of the block that ran last, by lane; zero where a lane skipped it.
    """

    mlp: Float[Tensor, "lanes hidden"] | None = None

    def __init__(
        self,
        backbone: Backbone,
        lanes: Lanes,
        kv: BlockKV,
        token_ids: Int[Tensor, " lanes"],
        router_sees: Bool[Tensor, " lanes"] | None = None,
        *,
        keeps_mlp: bool = False,
    ) -> None:
        check_threads()
        super().__init__(lanes, kv, token_ids, router_sees, backbone.spread)
        self.hidden: Float[Tensor, "lanes hidden"] = backbone.embed(token_ids[None])[0]
        self._backbone, self._keeps_mlp = backbone, keeps_mlp
        self._rotaries: dict[int, Rotary] = {}
        self._depth_shares: Float[Tensor, "lanes depths"] | None = None

    def residual(self, block: int) -> Float[Tensor, "lanes hidden"]:
        """The residual as it is now."""
        return self.hidden

    def set_residual(self, hidden: Float[Tensor, "lanes hidden"]) -> None:
        """Go on with another residual, also of lanes that skipped what ran last."""
        self.hidden = hidden
        self._places[:] = NOBODY

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""
        scales = self._backbone.depth_scales
        if scales is not None and plan is not None:
            self._depth_shares = scales.shares(plan.host.sum(1)).to(self.lanes.device)
        super().blocks(blocks, plan)
        if self._spread is not None:
            self.hidden = self.hidden.to(self.lanes.device)
            self.mlp = None if self.mlp is None else self.mlp.to(self.lanes.device)

    def compute(self, block: int, frame: Frame) -> None:
        """Run a block for the lanes of a frame, and put them back in their places."""
        self.hidden = self.hidden.to(frame.device)
        with piece(BLOCKS), self._mlp_kept(block, frame):
            out = self.run_frame(block, frame, self._kv.view(block, frame))
        with nullcontext() if frame.is_all else piece(GATHER_SCATTER):
            self.hidden = frame.merge(self.hidden, out)

    def finish(self, blocks: range, plan: DepthPlan | None, num_logits: int | None = None) -> None:
        """Run the last blocks; logits are the caller's to make, where it wants them."""
        self.blocks(blocks, plan)

    def run_frame(self, block: int, frame: Frame, kv: Any) -> Float[Tensor, "rows tokens hidden"]:
        """What a block makes of the lanes of a frame."""
        with nullcontext() if frame.is_all else piece(GATHER_SCATTER):
            hidden = frame.spread(self.hidden)
        rotary = self._rotaries.get(id(frame))
        if rotary is None:  # frames live as long as this pass
            rotary = self._rotaries[id(frame)] = self._backbone.rotary(hidden, frame.positions)
        shares = self._depth_shares
        with (
            nullcontext() if shares is None else depths_known(frame.spread(shares.to(frame.device)))
        ):
            return self._backbone.run_block(
                block, hidden, self._mask(block, frame), frame.positions, rotary, kv
            )

    @contextmanager
    def _mlp_kept(self, block: int, frame: Frame) -> Iterator[None]:
        if not self._keeps_mlp:
            yield
            return
        with self._backbone.watched_mlp(block) as seen:
            yield
        self.mlp = frame.merge(torch.zeros_like(self.hidden), self._rectangle(frame, seen[0]))

    def _rectangle(self, frame: Frame, values: Tensor) -> Tensor:
        """Values that a block made within `run_frame`, by place of the frame."""
        return values

    def _mask(self, block: int, frame: Frame) -> Bool[Tensor, "rows 1 tokens slots"] | None:
        window = self._backbone.windows[block]
        mask, visible = frame.mask(window), self._kv.visible(block, frame)
        if visible is not None:
            return (frame.full_mask(window) if mask is None else mask) & visible
        if mask is None and frame.width == 1:
            return self._backbone.open_mask(frame.num_rows, frame.stop)
        return mask
