"""Decode steps as CUDA graphs: one for each block, replayed by the host as the plan says.

A decode step of one row is hundreds of small kernels, and launching them takes longer than running
them. Captured once, a block is one launch. Graphs read and write fixed addresses, so the buffers of
a session (an arena) stay where they are; a session borrows an arena while it lives.

What a skipped block leaves in the cache is `engine/state/cache.py`'s alone, as in the general path.
"""

import weakref
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import rope_of_length
from buddy.depth.plan import DepthPlan
from buddy.engine.state.session import Session
from buddy.errors import ModelError

if TYPE_CHECKING:
    from buddy.engine.run import Step

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

    def __init__(self, backbone: Backbone, capture: Capture = capture_cuda) -> None:
        rope = rope_of_length(backbone.config)
        if rope is not None:
            raise ModelError(
                f"no graph can be captured: the rotary embedding is {rope!r}, which changes with "
                'the length; use engine="general"'
            )
        if backbone.family.mixture:
            raise ModelError(
                "no graph can be captured: each token chooses its experts, so the work is never "
                'the same; use engine="general"'
            )
        self._backbone, self._capture = backbone, capture
        self._arenas: list[Arena] = []
        self._lock = Lock()

    def takes(self, session: Session, step: "Step") -> bool:
        """Whether this is a decode step without pads and without gradients."""
        return (
            step.token_ids.shape[1] == 1
            and session.timeline.start > 0
            and not torch.is_grad_enabled()
            and bool(step.valid.all())
        )

    def begin(self, session: Session, token_ids: Int[Tensor, "batch one"]) -> "GraphRun":
        """A pass over a token of each row, for which the timeline is extended."""
        with self._lock:
            arena = next((a for a in self._arenas if a.holds(session)), None)
            if arena is None:
                free = next((a for a in self._arenas if a.fits(session)), None)
                arena = free or self._new(session)
                arena.lend(session)
        return GraphRun(arena, session, token_ids)

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

    def __init__(self, backbone: Backbone, capture: Capture, session: Session) -> None:
        timeline = session.timeline
        self._backbone = backbone
        self._key = _key(session)
        batch, slots, device = timeline.batch, timeline.capacity, timeline.device
        self._borrower: weakref.ref[Session] | None = None
        self._revision = -1
        heads = backbone.kv_width // backbone.head_dim
        shape = (batch, heads, slots, backbone.head_dim)

        def empty() -> list[Tensor]:
            blocks = range(backbone.num_blocks)
            return [torch.zeros(shape, dtype=backbone.dtype, device=device) for _ in blocks]

        self.keys, self.values = empty(), empty()
        self.valid = torch.zeros_like(timeline.valid)
        self.positions = torch.zeros_like(timeline.positions)
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.runs = torch.ones(batch, backbone.num_blocks, dtype=torch.bool, device=device)
        self.full_plan = DepthPlan.full(batch, backbone.num_blocks, device)
        hides = session.kv.kv_policy == "mask"
        self.hidden_slots = [torch.zeros_like(self.valid) if hides else None for _ in self.keys]
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
        """Move the session's cache and timeline here."""
        self._revision = session.kv.move_to(self.keys, self.values, self.hidden_slots)
        session.timeline.move_to(self.valid, self.positions)
        self._borrower = weakref.ref(session)

    def _open(self) -> None:
        backbone, batch = self._backbone, len(self.tokens)
        empty = torch.zeros(0, dtype=backbone.dtype, device=self.tokens.device)
        self.hidden = empty.new_zeros(batch, 1, backbone.config.hidden_size)
        with torch.no_grad():
            self.logits = torch.zeros_like(backbone.logits(self.hidden))
        self._position = torch.zeros_like(self.tokens)
        cos, sin = backbone.rotary(self.hidden, self._position)
        self._rotary = torch.zeros_like(cos), torch.zeros_like(sin)
        shape = (batch, 1, 1, len(self._every_slot))
        self._masks = {
            window: torch.zeros(shape, dtype=torch.bool, device=empty.device)
            for window in set(backbone.windows)
        }

    def _begin(self) -> None:
        """Embedding, rotary and masks."""
        self.hidden.copy_(self._backbone.embed(self.tokens))
        self._position.copy_(self.positions.index_select(1, self.slot))
        made = self._backbone.rotary(self.hidden, self._position)
        for kept, new in zip(self._rotary, made, strict=True):
            kept.copy_(new)
        for window, mask in self._masks.items():
            seen = self.valid & (self._every_slot <= self.slot)
            if window is not None:
                seen = seen & (self._position - self.positions < window)
            mask.copy_(seen[:, None, None])

    def _block(self, block: int) -> Callable[[], None]:
        """One block for all rows; those that skip it keep their residual and their cache."""
        hides = self.hidden_slots[block]

        def run() -> None:
            mask = self._masks[self._backbone.windows[block]]
            if hides is not None:
                mask = mask & ~hides[:, None, None]
                # A row that skips sees nothing else, perhaps: its own slot keeps the sum finite.
                mask = mask | (self._every_slot == self.slot)
            kv = _ArenaView(self, block)
            out = self._backbone.run_block(
                block, self.hidden, mask, self._position, self._rotary, kv
            )
            self.hidden.copy_(torch.where(self.runs[:, block, None, None], out, self.hidden))

        return run

    def _head(self) -> None:
        self.logits.copy_(self._backbone.logits(self.hidden))

    def write(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This step's keys and values into the slot of the rows that run; all slots back."""
        runs = self.runs[:, block, None, None, None]
        for buffer, new in ((self.keys[block], keys), (self.values[block], values)):
            kept = buffer.index_select(2, self.slot)
            buffer.index_copy_(2, self.slot, torch.where(runs, new, kept))
        return self.keys[block], self.values[block]


def _key(session: Session) -> tuple[int, int, bool]:
    timeline = session.timeline
    return timeline.batch, timeline.capacity, session.kv.kv_policy == "mask"


class _ArenaView:
    """A block's cache, under the name by which attention modules call it."""

    def __init__(self, arena: Arena, block: int) -> None:
        self._arena, self._block = arena, block

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values [batch, heads, 1, head]; return all to attend to."""
        return self._arena.write(self._block, keys, values)


class GraphRun:
    """One decode step on its way through the blocks; the counterpart of `BlockRun`."""

    def __init__(self, arena: Arena, session: Session, token_ids: Int[Tensor, "batch one"]) -> None:
        self._arena, self._kv = arena, session.kv
        self._executed = [0] * len(token_ids)
        arena.tokens.copy_(token_ids)
        arena.slot.fill_(session.timeline.start)
        arena.begin()

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every row runs them."""
        if len(blocks) > 0:
            self._run(blocks, self._arena.full_plan if plan is None else plan)

    def finish(self, blocks: range, plan: DepthPlan) -> Float[Tensor, "batch one vocab"]:
        """Run the last blocks, and the output projection."""
        self._run(blocks, plan)
        self._arena.head()
        return self._arena.logits.clone()

    def _run(self, blocks: range, plan: DepthPlan) -> None:
        self._arena.runs.copy_(plan.mask)
        for block in blocks:
            rows = plan.blocks[block]
            if rows.skip is not None:
                self._kv.skip(block, rows.skip, self._arena.hidden)
            if rows.run is not None:
                self._kv.fill(block, rows.run)
                self._arena.blocks[block]()
                for row, runs in enumerate(plan.rows):
                    self._executed[row] += runs[block]

    @property
    def hidden(self) -> Float[Tensor, "batch one hidden"]:
        """The residual, as it is now."""
        return self._arena.hidden.clone()

    def executed(self) -> Int[Tensor, " batch"]:
        """Blocks that each row ran, counted as they were replayed."""
        return torch.tensor(self._executed)
