"""The native decoder: the kernel, bound to a model's weights and fed with sessions.

It reads the weights where the Hugging Face modules keep them, so it costs no second copy, and
writes the session's own cache, so a session may go from the general path to this one and back.
"""

import ctypes
import sys
from threading import Lock
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from buddy.backbone.backbone import Backbone, check_token_ids
from buddy.backbone.depth_scales import unknown_depth
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.blocks import PassRun
from buddy.engine.executors.native import layout
from buddy.engine.executors.native.library import native_library
from buddy.engine.executors.native.openmp import openmp
from buddy.engine.executors.native.weights import BoundWeights, why_not
from buddy.engine.feed import Feed
from buddy.engine.fork_guard import check_threads
from buddy.engine.probe import BLOCKS, HEAD, KV_FILL, listener, piece
from buddy.engine.state.cache import BlockKVCache
from buddy.engine.state.lanes import Lanes
from buddy.engine.state.session import Session
from buddy.errors import ModelError

MOST_LANES: Final = 32
"""New tokens, over all rows, up to which a step is memory's to time, and makes logits of all."""
MOST_LOGITS: Final = 128
"""Residuals whose logits are made at once; of more, torch does it faster where it can."""
MOST_OF_A_STEP: Final = 4096
"""New tokens for which the kernel has memory; of a longer pass it runs a part after the other."""
ANY_NUMBER: Final = sys.maxsize
"""Of new tokens, where the kernel multiplies faster than torch however many there are."""
_WHOLE: Final = 64
"""Parts but the last have a multiple of so many new tokens: a prompt that is alone in a pass is cut
between those that the kernel attends together."""
MOST_BESIDE_TORCH: Final = MappingProxyType({"float32": 64, "bfloat16": 128, "quantised": 256})
"""New tokens of a pass for the kernel where torch multiplies faster, but does much else first; by
the format of weights."""
_LARGE: Final = 2**23
"""Weights of an MLP's matrix from which on what torch does first is little beside its products."""
_WITHOUT_BF16: Final = ("avx512_vnni", "avx512", "avx_vnni", "avx2")
"""Sets that torch has no fast products of bfloat16 for; the kernel widens weights as it reads."""


class NativeDecoder:
    """Runs blocks of a decode step in compiled code.

    Args:
        backbone: On a CPU, of a family that the kernel knows.
        threads: By default as many as torch uses.

    Raises:
        ModelError: The kernel cannot be had, or cannot run this model; the message says why.
    """

    name: Final = "native"
    makes_some_logits: Final = True

    def __init__(self, backbone: Backbone, threads: int | None = None) -> None:
        reason = why_not(backbone)
        if reason:
            raise ModelError(reason)
        self.library, team = native_library(), openmp()
        self._calls = self.library.calls
        self._backbone = backbone
        self._threads = threads
        self._engine = self._calls.buddy_engine_new(ctypes.byref(team))
        if not self._engine:
            raise MemoryError("the native engine could not get memory for itself")
        self._lock = Lock()
        self._weights = BoundWeights(backbone, bool(self._calls.buddy_has_tiles(self._engine)))
        self.seconds: Float[Tensor, " 3"] | None = None
        """Set to zeros, collects seconds in blocks, in filling holes, in the output projection."""
        self._bound: WeakKeyDictionary[Session, _BoundCache] = WeakKeyDictionary()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine:
            self._calls.buddy_engine_free(engine)

    @property
    def most_lanes(self) -> int:
        """New tokens of a pass, over all sequences, up to which the kernel is faster than torch."""
        model = self._weights.model
        if model.by_tiles or self._torch_widens:
            return ANY_NUMBER
        if model.hidden * model.inner >= _LARGE:
            return MOST_LANES
        if model.vocabulary.format not in (layout.FLOAT32, layout.BFLOAT16):
            return MOST_BESIDE_TORCH["quantised"]
        return MOST_BESIDE_TORCH["bfloat16" if model.is_bf16 else "float32"]

    @property
    def _torch_widens(self) -> bool:
        """Whether torch multiplies its weights without an instruction for them, and so slowly."""
        return self.library.instructions in _WITHOUT_BF16 and bool(self._weights.model.is_bf16)

    @property
    def steady_lanes(self) -> int:
        """The lanes that it takes; 0 where many have other numbers than few, as int4 by tiles."""
        return min(self.most_lanes, MOST_OF_A_STEP) if self._weights.is_steady else 0

    def takes(self, lanes: Lanes) -> bool:
        """Whether this pass is for the kernel."""
        return lanes.num <= self.most_lanes

    def begin(self, session: Session, lanes: Lanes, feed: Feed) -> "NativeRun":
        """A pass over new tokens."""
        check_threads()
        check_token_ids(feed.token_ids.tolist(), self._backbone.embedding.num_embeddings)
        with self._lock:
            self._weights.refresh(session.kv.capacity)
        bound = self._bound.get(session)
        if bound is None:
            bound = self._bound[session] = _BoundCache(self._backbone, session.kv)
        bound.refresh()
        return NativeRun(self, bound, lanes, feed)

    def logits(
        self, hidden: Float[Tensor, "*shape hidden"]
    ) -> Float[Tensor, "*shape vocab"] | None:
        """Logits of some residuals of a pass; None where they are many."""
        width = hidden.shape[-1]
        most = MOST_OF_A_STEP if self._torch_widens else MOST_LOGITS
        if hidden.numel() > most * width:
            return None
        residual = hidden.reshape(-1, width).float().contiguous()
        logits = _float32(len(residual), self._backbone.vocab)
        step = layout.Step(
            residual=residual.data_ptr(),
            logits=logits.data_ptr(),
            lanes=len(residual),
            first=self._backbone.num_blocks,
            stop=self._backbone.num_blocks,
            words=logits.shape[1],
        )
        self._call(layout.Cache(), step)
        return logits.view(*hidden.shape[:-1], -1)

    def run(self, bound: "_BoundCache", step: layout.Step) -> None:
        """Run what the step names."""
        probe, seconds = listener(), self.seconds
        if probe is not None:
            seconds = torch.zeros(3, dtype=torch.float64)
        step.seconds = None if seconds is None else seconds.data_ptr()
        self._call(bound.cache, step)
        if probe is not None and seconds is not None:
            probe.add(dict(zip((BLOCKS, KV_FILL, HEAD), seconds.tolist(), strict=True)))

    def _call(self, cache: layout.Cache, step: layout.Step) -> None:
        with self._lock:  # what steps work in is the engine's
            status = self._calls.buddy_step(
                self._engine,
                self._threads or torch.get_num_threads(),
                ctypes.byref(self._weights.model),
                ctypes.byref(cache),
                ctypes.byref(step),
            )
        if status != 0:
            raise MemoryError("the native engine could not get memory for a step")


def parts_of(lanes: int) -> list[range]:
    """Parts of a pass that run one after the other, of about as many new tokens each."""
    size = -(-lanes // -(-lanes // MOST_OF_A_STEP))
    whole = -(-size // _WHOLE) * _WHOLE
    return [range(start, min(start + whole, lanes)) for start in range(0, lanes, whole)]


def _float32(*shape: int) -> Tensor:
    """What the kernel writes and reads, whatever torch's defaults are."""
    return torch.empty(*shape, dtype=torch.float32, device="cpu")


_LEAVES: Final = {
    "zero": layout.ZEROS,
    "mask": layout.HIDDEN,
    "lazy": layout.RESIDUAL,
    "project": layout.PROJECTED,
}


class _BoundCache:
    """A session's cache, as the kernel is told of it."""

    def __init__(self, backbone: Backbone, kv: BlockKVCache) -> None:
        # Not the session itself: it is the weak key under which this is kept.
        self.backbone, self.kv = backbone, kv
        self.leaves = _LEAVES[kv.kv_policy]
        self.cache = layout.Cache()
        self._made_for: tuple[int, int, int] | None = None
        self._arrays: tuple[Any, ...] = ()
        width = backbone.config.hidden_size
        self._like = torch.empty(0, width, dtype=backbone.dtype, device="cpu")

    def refresh(self) -> None:
        """Tell the kernel of buffers that have moved."""
        kv, cache = self.kv, self.cache
        if self._made_for == (kv.revision, kv.rows, kv.capacity):
            return
        heads = self.backbone.kv_width // self.backbone.head_dim
        kv.allocate(heads, self.backbone.head_dim, self.backbone.dtype)
        # Held here, so that what the kernel is told of stays good.
        self._arrays = tuple(map(layout.pointers, kv.buffers())), kv.buffers()
        keys, values, hidden_slots = map(ctypes.addressof, self._arrays[0])
        cache.keys, cache.values = keys, values
        cache.hidden_slots = hidden_slots if kv.kv_policy == "mask" else None
        cache.capacity, cache.rows = kv.capacity, kv.rows
        self._made_for = (kv.revision, kv.rows, kv.capacity)

    def open_skipped(self, lanes: int) -> None:
        """Room for what a pass leaves, and where it goes."""
        skipped, cache = self.kv.skipped, self.cache
        if skipped is None:
            return
        # Of each lane, no two neighbouring blocks need a place of their own.
        skipped.room(lanes * (self.backbone.num_blocks // 2 + 1), self._like)
        arena = skipped.arena
        cache.waiting, cache.filled = arena.addresses
        cache.skipped, cache.num_skipped = arena.stored[0].data_ptr(), arena.counts[0]

    def close_skipped(self) -> None:
        """Take over how many residuals were stored."""
        if self.kv.skipped is not None:
            self.kv.skipped.arena.counts[0] = self.cache.num_skipped


class NativeRun(PassRun):
    """One pass on its way through the blocks; the counterpart of `BlockRun`."""

    def __init__(
        self, decoder: NativeDecoder, bound: _BoundCache, lanes: Lanes, feed: Feed
    ) -> None:
        super().__init__(lanes, bound.kv, feed.token_ids.long().contiguous(), feed.router_sees)
        self._decoder, self._bound, self._backbone = decoder, bound, bound.backbone
        self.hidden: Float[Tensor, "lanes hidden"] = _float32(
            lanes.num, self._backbone.config.hidden_size
        )
        self._executed = torch.zeros(lanes.num, dtype=torch.long, device="cpu")
        self._row, self._slot = lanes.row, lanes.slot  # held: the kernel has their addresses
        self._steps = {part.start: self._step(part) for part in parts_of(lanes.num)}

    def _step(self, part: range) -> layout.Step:
        """The new tokens of a part of the pass, which see those of the parts before."""
        start = part.start
        return layout.Step(
            tokens=self._token_ids[start:].data_ptr(),
            row=self._row[start:].ctypes.data,
            slot=self._slot[start:].ctypes.data,
            residual=self.hidden[start:].data_ptr(),
            executed=self._executed[start:].data_ptr(),
            lanes=len(part),
            leaves=self._bound.leaves,
            shares_rows=not self.lanes.is_one_each,
        )

    def set_residual(self, hidden: Float[Tensor, "lanes hidden"]) -> None:
        """Go on with another residual than the blocks so far have left."""
        self.hidden.copy_(hidden)

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every lane runs them."""
        self._run(blocks, self._host(blocks, plan), None)

    def finish(
        self, blocks: range, plan: DepthPlan | None, num_logits: int | None = None
    ) -> Float[Tensor, "lanes num_logits"] | None:
        """Run the last blocks, and the output projection where all lanes may want it."""
        if self.lanes.num > MOST_LANES:
            self._run(blocks, self._host(blocks, plan), None)
            return None
        width = self._backbone.vocab if num_logits is None else num_logits
        logits = _float32(self.lanes.num, width)
        self._run(blocks, self._host(blocks, plan), logits)
        return logits

    def _host(self, blocks: range, plan: DepthPlan | None) -> NDArray[np.bool_]:
        if plan is None:
            if self._backbone.depth_scales is not None and blocks.stop > 1:
                raise unknown_depth()
            return np.ones((self.lanes.num, self._backbone.num_blocks), np.bool_)
        return plan.host

    def _run(self, blocks: range, runs: NDArray[np.bool_], logits: Tensor | None) -> None:
        """Run the parts one after the other; logits are of a pass that is one part."""
        for start, step in self._steps.items():
            step.runs, step.first, step.stop = runs[start:].ctypes.data, blocks.start, blocks.stop
            step.logits = None if logits is None else logits.data_ptr()
            step.words = 0 if logits is None else logits.shape[1]
            with piece(BLOCKS):
                self._bound.open_skipped(step.lanes)
                self._decoder.run(self._bound, step)
                self._bound.close_skipped()

    def executed(self) -> Int[Tensor, " lanes"]:
        """Blocks that each lane ran, counted as they ran."""
        return self._executed
