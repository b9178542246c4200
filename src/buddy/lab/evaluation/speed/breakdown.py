"""Where the time of a routed pass goes: blocks, router, gather and scatter, KV fill, head, host."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from buddy.engine.clock import Clock
from buddy.engine.probe import BLOCKS, GATHER_SCATTER, HEAD, KV_FILL, ROUTER, listening

HOST: Final = "host"
PIECES: Final = (BLOCKS, ROUTER, GATHER_SCATTER, KV_FILL, HEAD, HOST)
"""Host is all that is no other piece: embedding, masks, sampling, and Python in between."""


class Profiler:
    """Cuts the time of a context into stretches, each of the innermost piece that was running.

    Args:
        clock: Takes the marks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stretches: list[tuple[str, Any, Any]] = []
        self._told: list[tuple[int, str, float]] = []
        self._open: list[str] = []
        self._since: Any = None

    @property
    def position(self) -> int:
        """Stretches so far: where a part of the run begins or ends."""
        return len(self._stretches)

    @contextmanager
    def piece(self, name: str) -> Iterator[None]:
        """What runs within it is this piece."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def add(self, seconds: dict[str, float]) -> None:
        """Note pieces that compiled code has timed itself, since the piece around them began."""
        self._since = self._clock.mark()
        self._told += [(self.position, name, each) for name, each in seconds.items()]

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
        end = self.position if end is None else end
        seconds = dict.fromkeys(PIECES, 0.0)
        for name, start, stop in self._stretches[begin:end]:
            seconds[name] += self._clock.seconds(start, stop)
        for at, name, each in self._told:
            if begin <= at < end:
                seconds[name] += each
        seconds[HOST] = max(0.0, elapsed_s - sum(seconds.values()))
        return seconds


@contextmanager
def profiled(clock: Clock) -> Iterator[Profiler]:
    """Time the pieces of every pass of this context until the block ends."""
    profiler = Profiler(clock)
    with listening(profiler):
        yield profiler
