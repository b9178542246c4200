"""How a measurement takes its text, and where it keeps what it has gathered."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

from jaxtyping import Int
from torch import Tensor

from buddy.processes import ALONE, Ranks
from buddy.resume import ResumeFile, fingerprint

BATCH: Final = 4
"""Rows of text at a time, where nothing else is said."""


class Work(TypedDict, total=False):
    """What every measurement and every search over text may be given by name."""

    batch: int
    """Rows of text at a time."""
    resume: Path | None
    """File that keeps what was gathered, however the work stops short; the caller deletes it once
    the result is kept."""
    identity: Mapping[str, Any] | None
    """What the work depends on (model, indicator ...); a file of another one is refused."""
    ranks: Ranks
    """Processes that share the batches; the writer alone keeps the file."""


def resume_file(
    text: Int[Tensor, "rows tokens"], settings: Mapping[str, Any], work: Work
) -> ResumeFile:
    """The file of some work over a text.

    Args:
        text: That is measured.
        settings: What the result depends on besides the text and the work's own.
        work: As the caller gave it.
    """
    about = {**settings, "batch": work.get("batch", BATCH), **(work.get("identity") or {})}
    path = work.get("resume") if work.get("ranks", ALONE).is_writer else None
    return ResumeFile(path, {**about, "text": fingerprint(text)})
