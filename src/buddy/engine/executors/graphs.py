"""Decode steps as CUDA graphs: one for each block, replayed by the host as the plan says.

A decode step of one row is hundreds of small kernels, and launching them takes longer than running
them. Captured once, a block is one launch, and so are all blocks of a plan that recurs. Graphs read
and write the fixed addresses of an arena, which is the cache of one session at a time.

What a skipped block leaves in the cache is `engine/state/cache.py`'s alone, as in the general path.
"""

from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import rope_of_length
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.arena import Arena, Capture, Captured
from buddy.engine.executors.blocks import LaneRun
from buddy.engine.executors.recurring import BlockOrder, Replay
from buddy.engine.feed import Feed
from buddy.engine.probe import BLOCKS, HEAD, KV_FILL, piece
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.session import Session
from buddy.engine.state.skipped import NOBODY
from buddy.engine.state.view import lane_index
from buddy.errors import ModelError

_WARM_UPS: Final = 2
_MOST_IDLE: Final = 8
"""Arenas that are kept for sessions to come."""
_IDLE_BYTES: Final = 1 << 28
"""What these may take, or else half of what those in use take."""


@cache
def _capture_stream(device: torch.device) -> Any:
    """The stream on which a device's graphs are captured; torch's own is the first device's."""
    return cast(Any, torch.cuda.Stream)(device)


def capture_cuda(device: torch.device, pool: Any, work: Callable[[], None]) -> Replay:
    """A CUDA graph of the work, which is run a few times first, as capturing demands.

    It is run and captured on one stream of the device: what is allocated on a stream, such as the
    workspace of a matrix product, is kept for this stream.

    Args:
        device: Where all of it runs.
        pool: Where what is passing lies; graphs that are never replayed at once may share it.
        work: Reads and leaves all that lasts outside of the pool.
    """
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            work()
    return graph.replay


class GraphDecoder:
    """Runs decode steps of one token a row by replaying captured blocks.

    Args:
        backbone: On a CUDA device.
        capture: Makes a replay of a piece of work; None = a CUDA graph.

    Raises:
        ModelError: The blocks are on several devices; or the angles of the rotary embedding depend
            on the length, or the experts on the token: no fixed work.
    """

    name: Final = "graphs"
    makes_some_logits: Final = False
    steady_lanes: Final = 0

    def __init__(self, backbone: Backbone, capture: Capture | None = None) -> None:
        if backbone.spread is not None:
            raise ModelError(
                "no graph can be captured: the blocks are on several devices, and a graph is of one"
            )
        if backbone.depth_scales is not None:
            raise ModelError(
                "no graph can be captured: the adapters know how many blocks a token runs, which "
                "changes from token to token"
            )
        rope = rope_of_length(backbone.config)
        if rope is not None:
            raise ModelError(
                f"no graph can be captured: the rotary embedding is {rope!r}, which changes with "
                "the length"
            )
        if backbone.family.mixture:
            raise ModelError(
                "no graph can be captured: each token chooses its experts, so the work is never "
                "the same"
            )
        self._backbone, self._capture = backbone, capture
        self._arenas: list[Arena] = []
        self._lock = Lock()

    def logits(self, hidden: Float[Tensor, "*shape hidden"]) -> None:
        """Left to the general path."""

    def takes(self, lanes: Lanes) -> bool:
        """Whether this pass is a decode step: one new token of each sequence that takes part."""
        return lanes.is_one_each and all(lanes.starts)

    def begin(self, session: Session, lanes: Lanes, feed: Feed) -> "GraphRun":
        """A pass over a token of each sequence; rows that take no part skip every block."""
        with self._lock:
            arena = next((a for a in self._arenas if a.holds(session)), None)
            arena = arena or self._lend(session)
            captured = arena.captured(max(lanes.stops))
        find = partial(self._recurring, arena, captured)
        return GraphRun(arena, captured, session, lanes, feed, find)

    def _recurring(self, arena: Arena, captured: Captured, order: BlockOrder) -> Replay | None:
        with self._lock:  # one thread may capture at a time
            return arena.recurring(captured, order)

    def _lend(self, session: Session) -> Arena:
        """An arena that nobody else has, or a new one; what the session has outgrown is freed."""
        arena = next((a for a in self._arenas if a.fits(session)), None)
        self._arenas = [a for a in self._arenas if a is not arena and a.borrower is not session]
        if arena is None:
            # The graphs of an arena are replayed one after another, by one session.
            capture = self._capture or partial(
                capture_cuda, self._backbone.device, torch.cuda.graph_pool_handle()
            )
            arena = Arena(self._backbone, capture, session)
        arena.lend(session)
        self._arenas.append(arena)
        self._free_idle()
        return arena

    def _free_idle(self) -> None:
        """Let arenas go that nobody has, those first that were lent longest ago."""
        idle = [arena for arena in self._arenas if arena.borrower is None]
        lent = sum(arena.num_bytes for arena in self._arenas if arena not in idle)
        most = max(_IDLE_BYTES, lent // 2)
        while len(idle) > _MOST_IDLE or sum(arena.num_bytes for arena in idle) > most:
            self._arenas.remove(idle.pop(0))


class GraphRun(LaneRun):
    """One decode step on its way through captured blocks; the counterpart of `BlockRun`."""

    def __init__(
        self,
        arena: Arena,
        captured: Captured,
        session: Session,
        lanes: Lanes,
        feed: Feed,
        find: Callable[[BlockOrder], Replay | None],
    ) -> None:
        super().__init__(lanes, session.kv, feed.token_ids, feed.router_sees)
        self._arena, self._captured, self._find = arena, captured, find
        self._order: BlockOrder | None = None
        self._rows = lane_index(lanes.row, lanes.device)
        is_whole = lanes.rows == tuple(range(len(arena.tokens)))
        self._which = slice(None) if is_whole else self._rows
        if not is_whole:  # a row that takes no part reads and keeps its last slot
            arena.tokens.zero_()
            arena.slot.zero_()
        arena.tokens.index_copy_(0, self._rows, feed.token_ids[:, None].to(arena.tokens.dtype))
        slot = lane_index(lanes.slot, lanes.device)[:, None]
        arena.slot.index_copy_(0, self._rows, slot)
        captured.begin()

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""
        order = BlockOrder(blocks, plan)
        whole = self._find(order)
        mask = self._arena.block_mask
        mask.zero_()
        lanes = torch.ones_like(mask[: self.lanes.num]) if plan is None else plan.mask
        mask.index_copy_(0, self._rows, lanes)
        self._order = None if whole is None else order
        if whole is not None:
            self._run_whole(whole, order, plan)
        super().blocks(blocks, plan)

    def _run_whole(self, whole: Replay, order: BlockOrder, plan: DepthPlan | None) -> None:
        """Replay all blocks at once; what they see of earlier tokens is made before."""
        with piece(KV_FILL):
            for block in order.runs:
                run = None if plan is None else plan.by_block[block][0]
                self._kv.fill(block, self.frame(run, block))
        with piece(BLOCKS):
            whole()

    def set_residual(self, hidden: Float[Tensor, "lanes hidden"]) -> None:
        """Go on with another residual than the blocks so far have left."""
        self._arena.hidden.index_copy_(0, self._rows, hidden[:, None])
        self._places[:] = NOBODY

    def compute(self, block: int, frame: Frame) -> None:
        """Replay a block that has not run yet; who runs it is in the arena's memory."""
        if self._order is None:
            with piece(BLOCKS):
                self._captured.blocks[block]()

    def finish(
        self, blocks: range, plan: DepthPlan | None, num_logits: int | None = None
    ) -> Float[Tensor, "lanes num_logits"]:
        """Run the last blocks, and the output projection, which is captured whole."""
        self.blocks(blocks, plan)
        with piece(HEAD):
            self._arena.head()
        return self._arena.logits[self._rows, 0, :num_logits]

    @property
    def hidden(self) -> Float[Tensor, "lanes hidden"]:
        """The residual, as it is now."""
        return self._arena.hidden[self._rows, 0]

    def residual(self, block: int) -> Float[Tensor, "lanes hidden"]:
        """The residual that enters a block, as it is now or was kept on the way, until the next."""
        arena, order = self._arena, self._order
        hidden = arena.hidden if order is None else arena.entering[order.enters[block]]
        return hidden[self._which, 0]
