"""Progress: what long work calls to say how far it is."""

from collections.abc import Callable

OnFetch = Callable[[str, int, int | None], None]
"""Called as `on_progress(stage, done, total)`.

Stages come in the order wait (another process holds the model), download, verify, extract, convert,
measure, export; each may be absent, and a failed download may start again from zero. `done` and
`total` are bytes, except in convert, where they are tensors, and in measure, where they are blocks
run; `total` is None while it is not known.
"""


def silent(stage: str, done: int, total: int | None) -> None:
    """Report nothing: the default of every `on_progress`."""
