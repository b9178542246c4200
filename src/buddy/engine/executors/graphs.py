"""Decode steps as CUDA graphs: one for each block, replayed by the host as the plan says.

A decode step of one row is hundreds of small kernels, and launching them takes longer than running
them. Captured once, a block is one launch. Graphs read and write fixed addresses, so the buffers of
a session (an arena) stay where they are; a session borrows an arena while it lives.

What a skipped block leaves in the cache is `engine/state/cache.py`'s alone, as in the general path.
"""

import weakref
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import rope_of_length
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.blocks import LaneRun
from buddy.engine.feed import Feed
from buddy.engine.probe import BLOCKS, HEAD, piece
from buddy.engine.state.lanes import Frame, Lanes
from buddy.engine.state.session import Session
from buddy.engine.state.skipped import NOBODY
from buddy.engine.state.view import BlockView, lane_index
from buddy.errors import ModelError

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function does, in fixed memory; calling the result does it again."""

_WARM_UPS: Final = 2
_MOST_ARENAS: Final = 8
"""Kept for sessions to come; more only while as many sessions live."""


def capture_cuda(work: Callable[[], None]) -> Replay:
    """A CUDA graph of the work, which is run a few times first, as capturing demands."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class GraphDecoder:
    """Runs decode steps of one token a row by replaying captured blocks.

    Args:
        backbone: On a CUDA device.
        capture: Makes a replay of a piece of work.

    Raises:
        ModelError: The angles of the rotary embedding depend on the length, or the experts on
            the token: no fixed work.
    """

    name: Final = "graphs"
    makes_some_logits: Final = False
    steady_lanes: Final = 0

    def __init__(self, backbone: Backbone, capture: Capture = capture_cuda) -> None:
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
            if arena is None:
                free = next((a for a in self._arenas if a.fits(session)), None)
                arena = free or self._new(session)
                arena.lend(session)
        return GraphRun(arena, session, lanes, feed)

    def _new(self, session: Session) -> "Arena":
        if len(self._arenas) >= _MOST_ARENAS:
            idle = next((a for a in self._arenas if a.borrower is None), None)
            if idle is not None:
                self._arenas.remove(idle)
        self._arenas.append(Arena(self._backbone, self._capture, session))
        return self._arenas[-1]


class Arena:
    """Buffers of one session at a time, and the graphs that work in them.

    Args:
        backbone: Whose blocks are captured.
        capture: Makes a replay of a piece of work.
        session: Its batch and capacity are the arena's.
    """

    @torch.inference_mode(False)  # it outlives whoever decodes first
    @torch.no_grad()
    def __init__(self, backbone: Backbone, capture: Capture, session: Session) -> None:
        self._backbone = backbone
        self._key = _key(session)
        rows, slots, device = session.kv.rows, session.kv.capacity, session.kv.device
        self._borrower: weakref.ref[Session] | None = None
        self._revision = -1
        heads = backbone.kv_width // backbone.head_dim
        shape = (rows, heads, slots, backbone.head_dim)

        def empty() -> list[Tensor]:
            blocks = range(backbone.num_blocks)
            return [torch.zeros(shape, dtype=backbone.dtype, device=device) for _ in blocks]

        self.keys, self.values = empty(), empty()
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.slot = torch.zeros_like(self.tokens)
        self.block_mask = torch.ones(rows, backbone.num_blocks, dtype=torch.bool, device=device)
        hides = session.kv.kv_policy == "mask"
        nothing = torch.zeros(rows, slots, dtype=torch.bool, device=device)
        self.hidden_slots = [nothing.clone() if hides else None for _ in self.keys]
        self._every_slot = torch.arange(slots, device=device)
        self._open()
        self.begin = capture(self._begin)
        self.blocks = [capture(self._block(block)) for block in range(backbone.num_blocks)]
        self.head = capture(self._head)

    def holds(self, session: Session) -> bool:
        """Whether the session's buffers are this arena's."""
        return (
            self.borrower is session
            and self._revision == session.kv.revision
            and self._key == _key(session)
        )

    @property
    def borrower(self) -> Session | None:
        """Who has it; None where its last borrower is gone."""
        return None if self._borrower is None else self._borrower()

    def fits(self, session: Session) -> bool:
        """Whether nobody else has it, and the session's buffers are of its size."""
        return self.borrower in (None, session) and self._key == _key(session)

    def lend(self, session: Session) -> None:
        """Move the session's cache here."""
        self._revision = session.kv.move_to(self.keys, self.values, self.hidden_slots)
        self._borrower = weakref.ref(session)

    def _open(self) -> None:
        backbone, rows = self._backbone, len(self.tokens)
        empty = torch.zeros(0, dtype=backbone.dtype, device=self.tokens.device)
        self.hidden = empty.new_zeros(rows, 1, backbone.config.hidden_size)
        self.logits = torch.zeros_like(backbone.logits(self.hidden))
        cos, sin = backbone.rotary(self.hidden, self.slot)
        self._rotary = torch.zeros_like(cos), torch.zeros_like(sin)
        shape = (rows, 1, 1, len(self._every_slot))
        self._masks = {
            window: torch.zeros(shape, dtype=torch.bool, device=empty.device)
            for window in set(backbone.windows)
        }

    def _begin(self) -> None:
        """Embedding, rotary and masks."""
        self.hidden.copy_(self._backbone.embed(self.tokens))
        angles = self._backbone.rotary(self.hidden, self.slot)
        for buffer, new in zip(self._rotary, angles, strict=True):
            buffer.copy_(new)
        for window, mask in self._masks.items():
            distance = self.slot - self._every_slot
            seen = distance >= 0
            if window is not None:
                seen = seen & (distance < window)
            mask.copy_(seen[:, None, None])

    def _block(self, block: int) -> Callable[[], None]:
        """One block for all rows; those that skip it keep their residual and their cache."""
        hides = self.hidden_slots[block]

        def run() -> None:
            mask = self._masks[self._backbone.windows[block]]
            if hides is not None:
                mask = mask & ~hides[:, None, None]
                # A row that skips sees nothing else, perhaps: its own slot keeps the sum finite.
                mask = mask | (self._every_slot == self.slot)[:, None, None]
            kv = BlockView(partial(self.write, block))
            out = self._backbone.run_block(block, self.hidden, mask, self.slot, self._rotary, kv)
            self.hidden.copy_(torch.where(self.block_mask[:, block, None, None], out, self.hidden))

        return run

    def _head(self) -> None:
        self.logits.copy_(self._backbone.logits(self.hidden))

    def write(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This step's keys and values into the slot of the rows that run; all slots back."""
        runs = self.block_mask[:, block, None, None, None]
        slot = self.slot[:, None, :, None].expand_as(keys)
        for buffer, new in ((self.keys[block], keys), (self.values[block], values)):
            buffer.scatter_(2, slot, torch.where(runs, new, buffer.gather(2, slot)))
        return self.keys[block], self.values[block]


def _key(session: Session) -> tuple[int, int, bool]:
    return session.kv.rows, session.kv.capacity, session.kv.kv_policy == "mask"


class GraphRun(LaneRun):
    """One decode step on its way through captured blocks; the counterpart of `BlockRun`."""

    def __init__(self, arena: Arena, session: Session, lanes: Lanes, feed: Feed) -> None:
        super().__init__(lanes, session.kv, feed.token_ids, feed.router_sees)
        self._arena = arena
        self._rows = lane_index(lanes.row, lanes.device)
        is_whole = lanes.rows == tuple(range(len(arena.tokens)))
        if not is_whole:  # a row that takes no part reads and keeps its last slot
            arena.tokens.zero_()
            arena.slot.zero_()
        arena.tokens.index_copy_(0, self._rows, feed.token_ids[:, None].to(arena.tokens.dtype))
        slot = lane_index(lanes.slot, lanes.device)[:, None]
        arena.slot.index_copy_(0, self._rows, slot)
        arena.begin()

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""
        mask = self._arena.block_mask
        mask.zero_()
        lanes = torch.ones_like(mask[: self.lanes.num]) if plan is None else plan.mask
        mask.index_copy_(0, self._rows, lanes)
        super().blocks(blocks, plan)

    def set_residual(self, hidden: Float[Tensor, "lanes hidden"]) -> None:
        """Go on with another residual than the blocks so far have left."""
        self._arena.hidden.index_copy_(0, self._rows, hidden[:, None])
        self._places[:] = NOBODY

    def compute(self, block: int, frame: Frame) -> None:
        """Replay a block; who runs it is in the arena's memory."""
        with piece(BLOCKS):
            self._arena.blocks[block]()

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

    def residual(self) -> Float[Tensor, "lanes hidden"]:
        """The residual as it is now."""
        return self.hidden
