"""Where the engine tells a profiler what it is doing; without one it tells nobody.

The profiler of one thread hears nothing of another's passes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Final, Protocol, runtime_checkable

BLOCKS: Final = "blocks"
ROUTER: Final = "router"
GATHER_SCATTER: Final = "gather_scatter"
KV_FILL: Final = "kv_fill"
HEAD: Final = "head"


@runtime_checkable
class Probe(Protocol):
    """Notes what the passes of this context do."""

    def piece(self, name: str) -> AbstractContextManager[None]:
        """What runs within it is this piece; a piece within another is counted once."""

    def add(self, seconds: dict[str, float]) -> None:
        """Note pieces that compiled code has timed itself, since the piece around them began."""


_LISTENER: ContextVar[Probe | None] = ContextVar("buddy_probe", default=None)
_NOTHING: Final = nullcontext()


def listener() -> Probe | None:
    """Who listens in this context."""
    return _LISTENER.get()


def piece(name: str) -> AbstractContextManager[None]:
    """What runs within it is this piece of a pass."""
    probe = _LISTENER.get()
    return _NOTHING if probe is None else probe.piece(name)


@contextmanager
def listening(probe: Probe) -> Iterator[None]:
    """Let the engine tell this probe what it does, within the context."""
    token = _LISTENER.set(probe)
    try:
        yield
    finally:
        _LISTENER.reset(token)
