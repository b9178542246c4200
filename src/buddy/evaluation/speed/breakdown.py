"""Where the time of a routed pass goes: blocks, router, gather and scatter, KV fill, head, host.

The pieces are timed by wrappers that stand around the engine's functions for a profiled pass
alone; at other times nothing of this is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch

from buddy.backbone.backbone import Backbone
from buddy.engine import run as step
from buddy.engine.executors.native.decoder import NativeDecoder
from buddy.engine.state.cache import BlockKVCache
from buddy.evaluation.speed.clock import Clock

BLOCKS: Final = "blocks"
ROUTER: Final = "router"
GATHER_SCATTER: Final = "gather_scatter"
KV_FILL: Final = "kv_fill"
HEAD: Final = "head"
HOST: Final = "host"
_KERNEL_PIECES: Final = (BLOCKS, KV_FILL, HEAD)
"""As the native decoder counts them."""
PIECES: Final = (BLOCKS, ROUTER, GATHER_SCATTER, KV_FILL, HEAD, HOST)
"""Host is all that is no other piece: embedding, masks, sampling, and Python in between."""

Function = Callable[..., Any]


class Profiler:
    """Cuts the time of one thread into stretches, each of the innermost piece that was running.

    Args:
        clock: Takes the marks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stretches: list[tuple[str, Any, Any]] = []
        self._open: list[str] = []
        self._since: Any = None

    @property
    def position(self) -> int:
        """Stretches so far: where a part of the run begins or ends."""
        return len(self._stretches)

    def timed(self, piece: str, function: Function, only: Function | None = None) -> Function:
        """The same function, its time noted as that of `piece`.

        Args:
            piece: One of `PIECES`.
            function: Any.
            only: Whether a call with these arguments is to be noted; all are by default.
        """

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if only is not None and not only(*args):
                return function(*args, **kwargs)
            self._turn()
            self._open.append(piece)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._open.pop()

        return run

    def decoded(self, run: Function) -> Function:
        """The native decoder's `run`, its time divided as the kernel itself tells."""

        @wraps(run)
        def timed(decoder: Any, *args: Any) -> Any:
            decoder.seconds = torch.zeros(len(_KERNEL_PIECES), dtype=torch.float64)
            self._turn()
            try:
                return run(decoder, *args)
            finally:
                self._since = self._clock.mark()
                parts = zip(_KERNEL_PIECES, decoder.seconds.tolist(), strict=True)
                self._stretches += [(piece, 0.0, seconds) for piece, seconds in parts]
                decoder.seconds = None

        return timed

    def _turn(self) -> None:
        """End the stretch that is running; the next begins."""
        now = self._clock.mark()
        if self._open:
            self._stretches.append((self._open[-1], self._since, now))
        self._since = now

    def breakdown(
        self, elapsed_s: float, begin: int = 0, end: int | None = None
    ) -> dict[str, float]:
        """Seconds of each piece between two positions.

        Args:
            elapsed_s: From the one to the other; what no piece took is the host's.
            begin: A position.
            end: A later one; the present one by default.
        """
        seconds = dict.fromkeys(PIECES, 0.0)
        for piece, start, stop in self._stretches[begin:end]:
            seconds[piece] += self._clock.seconds(start, stop)
        seconds[HOST] = max(0.0, elapsed_s - sum(seconds.values()))
        return seconds


@contextmanager
def profiled(clock: Clock) -> Iterator[Profiler]:
    """Time the pieces of every pass until the block ends, in whatever model."""
    profiler = Profiler(clock)
    timed = profiler.timed
    seams: tuple[tuple[Any, str, Function], ...] = (
        (Backbone, "run_block", timed(BLOCKS, Backbone.run_block)),
        (Backbone, "logits", timed(HEAD, Backbone.logits)),
        (step, "route_step", timed(ROUTER, _routed_and_divided(step.route_step))),
        (step.BlockRun, "gather", timed(GATHER_SCATTER, step.BlockRun.gather)),
        (step.BlockRun, "scatter", timed(GATHER_SCATTER, step.BlockRun.scatter)),
        # Inside a block: where only some rows run, their whole cache is gathered.
        (BlockKVCache, "write", timed(GATHER_SCATTER, BlockKVCache.write, only=_of_some_rows)),
        (BlockKVCache, "skip", timed(KV_FILL, BlockKVCache.skip)),
        (BlockKVCache, "fill", timed(KV_FILL, BlockKVCache.fill)),
        (NativeDecoder, "run", profiler.decoded(NativeDecoder.run)),
    )
    plain = [(owner, name, getattr(owner, name)) for owner, name, _ in seams]
    try:
        for owner, name, wrapper in seams:
            setattr(owner, name, wrapper)
        yield profiler
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)


def _routed_and_divided(route_step: Function) -> Function:
    """Divides the rows at once, which the blocks else would do: it is the router's cost too."""

    @wraps(route_step)
    def run(*args: Any) -> Any:
        plan = route_step(*args)
        _ = plan.blocks  # kept by the plan
        return plan

    return run


def _of_some_rows(cache: BlockKVCache, block: int, rows: Any, *rest: Any) -> bool:
    return not isinstance(rows, slice)
