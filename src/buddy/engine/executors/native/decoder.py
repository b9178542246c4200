"""The native decoder: the kernel, bound to a model's weights and fed with sessions.

It reads the weights where the Hugging Face modules keep them, so it costs no second copy, and
writes the session's own cache, so a session may go from the general path to this one and back.
"""

import ctypes
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.native import layout
from buddy.engine.executors.native.library import native_library, openmp
from buddy.engine.executors.native.weights import BoundWeights, why_not
from buddy.engine.state.session import Session
from buddy.errors import ModelError

if TYPE_CHECKING:
    from buddy.engine.run import Step

MOST_LANES: Final = 32
"""New tokens, over all rows, up to which a step is memory's to time; beyond, the general path."""


class NativeDecoder:
    """Runs blocks of a decode step in compiled code.

    Args:
        backbone: On a CPU, of a family that the kernel knows.
        threads: By default as many as torch uses.

    Raises:
        ModelError: The kernel cannot run this model; the message says why.
    """

    def __init__(self, backbone: Backbone, threads: int | None = None) -> None:
        reason = why_not(backbone)
        try:
            if reason:
                raise ModelError(reason)
            self._library, team = native_library(), openmp()
        except ModelError as error:
            raise ModelError(
                f'the native engine cannot run this model: {error}; use engine="general"'
            ) from error
        self._backbone = backbone
        self._threads = threads
        self._engine = self._library.buddy_engine_new(ctypes.byref(team))
        if not self._engine:
            raise MemoryError("the native engine could not get memory for itself")
        self._lock = Lock()
        self._weights = BoundWeights(backbone)
        self.seconds: Float[Tensor, " 3"] | None = None
        """Set to zeros, collects seconds in blocks, in filling holes, in the output projection."""
        self._bound: WeakKeyDictionary[Session, _BoundSession] = WeakKeyDictionary()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine:
            self._library.buddy_engine_free(engine)

    def takes(self, session: Session, step: "Step") -> bool:
        """Whether this step is for the kernel: few tokens, no pads, and no gradients."""
        return (
            step.token_ids.numel() <= MOST_LANES
            and session.timeline.start > 0
            and not torch.is_grad_enabled()
            and bool(step.valid.all())
        )

    def begin(self, session: Session, token_ids: Int[Tensor, "batch tokens"]) -> "NativeRun":
        """A pass over new tokens, none of them a pad, for which the timeline is extended."""
        vocab = self._backbone.embedding.num_embeddings
        wrong = [token for token in token_ids.flatten().tolist() if not 0 <= token < vocab]
        if wrong:
            raise IndexError(f"token id {wrong[0]} is not below the vocabulary's {vocab}")
        with self._lock:
            self._weights.refresh(session.timeline.capacity)
        bound = self._bound.get(session)
        if bound is None:
            bound = self._bound[session] = _BoundSession(self._backbone, session)
        bound.refresh()
        return NativeRun(self, bound, token_ids)

    def run(self, bound: "_BoundSession", step: layout.Step) -> None:
        """Run what the step names."""
        step.seconds = None if self.seconds is None else self.seconds.data_ptr()
        with self._lock:  # what steps work in is the engine's
            status = self._library.buddy_step(
                self._engine,
                self._threads or torch.get_num_threads(),
                ctypes.byref(self._weights.model),
                ctypes.byref(bound.cache),
                ctypes.byref(step),
            )
        if status != 0:
            raise MemoryError("the native engine could not get memory for a step")


class _BoundSession:
    """A session's buffers, as the kernel is told of them."""

    def __init__(self, backbone: Backbone, session: Session) -> None:
        # Not the session itself: it is the weak key under which this is kept.
        self.timeline, self.kv = session.timeline, session.kv
        self.backbone = backbone
        self._revision = -1
        self.cache = layout.Cache()
        self.leaves = {"zero": 0, "mask": 0, "lazy": 1, "project": 2}[session.kv.kv_policy]
        self._arrays: tuple[Any, ...] = ()
        self._like = torch.empty(0, backbone.config.hidden_size, dtype=backbone.dtype)

    def refresh(self) -> None:
        """Tell the kernel of buffers that have moved."""
        timeline, kv, cache = self.timeline, self.kv, self.cache
        if kv.revision != self._revision or timeline.capacity != cache.capacity:
            heads = self.backbone.kv_width // self.backbone.head_dim
            kv.allocate(heads, self.backbone.head_dim, self.backbone.dtype)
            keys, values = (layout.pointers(held) for held in kv.buffers())
            self._arrays = (keys, values)
            cache.keys = ctypes.addressof(keys)
            cache.values = ctypes.addressof(values)
            cache.capacity, cache.rows = timeline.capacity, timeline.batch
            self._revision = kv.revision
        cache.valid = timeline.valid.data_ptr() if timeline.has_pads else None
        cache.positions = timeline.positions.data_ptr()
        hidden = kv.hidden_slots()
        cache.hidden_slots = None
        if hidden is not None:
            self._hidden = layout.pointers(hidden)
            cache.hidden_slots = ctypes.addressof(self._hidden)

    def open_passed(self, lanes: int) -> None:
        """Room for what this step leaves, and where it goes."""
        passed, cache = self.kv.passed, self.cache
        if passed is None:
            return
        passed.fit()
        # Of each lane, no two neighbouring blocks need a place of their own.
        passed.room(lanes * (self.backbone.num_blocks // 2 + 1), self._like)
        assert passed.stored is not None
        cache.waiting, cache.filled = passed.waiting.data_ptr(), passed.filled.ctypes.data
        cache.passed, cache.num_passed = passed.stored.data_ptr(), passed.count

    def close_passed(self) -> None:
        """Take over how many residuals were stored."""
        if self.kv.passed is not None:
            self.kv.passed.count = self.cache.num_passed


class NativeRun:
    """One pass on its way through the blocks; the counterpart of `BlockRun`."""

    def __init__(
        self, decoder: NativeDecoder, bound: _BoundSession, token_ids: Int[Tensor, "batch tokens"]
    ) -> None:
        batch, tokens = token_ids.shape
        self._decoder, self._bound, self._backbone = decoder, bound, bound.backbone
        self._shape = (batch, tokens)
        lanes = batch * tokens
        self._tokens = token_ids.long().contiguous()
        self._residual = torch.empty(batch, tokens, self._backbone.config.hidden_size)
        self._executed = torch.zeros(lanes, dtype=torch.long)
        self._step = layout.Step(
            tokens=self._tokens.data_ptr(),
            residual=self._residual.data_ptr(),
            executed=self._executed.data_ptr(),
            lanes=lanes,
            columns=tokens,
            start=bound.timeline.start,
            leaves=bound.leaves,
        )
        self._bound.open_passed(lanes)

    def blocks(self, blocks: range, plan: DepthPlan | None) -> None:
        """Run these blocks under the plan; without one every row runs them."""
        if len(blocks) > 0:
            plan = plan or DepthPlan.full(self._shape[0], self._backbone.num_blocks)
            self._run(blocks, plan.mask, None)

    def finish(self, blocks: range, plan: DepthPlan) -> Float[Tensor, "batch tokens vocab"]:
        """Run the last blocks, and the output projection."""
        logits = torch.empty(*self._shape, cast(Any, self._backbone.head).out_features)
        self._run(blocks, plan.mask, logits)
        return logits

    def _run(
        self, blocks: range, mask: Bool[Tensor, "batch blocks"], logits: Tensor | None
    ) -> None:
        tokens = self._shape[1]
        runs = mask.repeat_interleave(tokens, 0) if tokens > 1 else mask.contiguous()
        kv = self._bound.kv
        if kv.kv_policy == "mask":
            kv.hide(blocks, mask)
            self._bound.refresh()
        step = self._step
        step.runs, step.first, step.stop = runs.data_ptr(), blocks.start, blocks.stop
        step.logits = None if logits is None else logits.data_ptr()
        self._decoder.run(self._bound, step)
        self._bound.close_passed()

    @property
    def hidden(self) -> Float[Tensor, "batch tokens hidden"]:
        """The residual, float32."""
        return self._residual

    def executed(self) -> Int[Tensor, " batch"]:
        """Blocks that each row ran, counted as they ran."""
        tokens = self._shape[1]
        return self._executed if tokens == 1 else self._executed[::tokens]
