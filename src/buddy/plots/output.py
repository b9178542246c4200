"""A figure as a file: PNG, PDF or SVG by its suffix, whole or not at all."""

import os
import uuid
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from buddy.errors import ResultError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The dates and versions that would make two files of one figure differ.
_METADATA: Final[dict[str, dict[str, None]]] = {
    ".png": {"Software": None},
    ".pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    ".svg": {"Creator": None, "Date": None},
}


def check_out(path: Path) -> None:
    """See that a figure could be written there, before the work of drawing it.

    Raises:
        ResultError: An unknown suffix, no folder, or something there that is no file.
    """
    if path.suffix.lower() not in _METADATA:
        raise ResultError(
            f"a figure is written as {', '.join(_METADATA)}, got {path.name!r}: "
            "give it one of these suffixes"
        )
    if not path.parent.is_dir():
        raise ResultError(f"{path}: there is no folder {path.parent}; make it first")
    if path.exists() and not path.is_file():
        raise ResultError(f"{path} is no regular file: name another")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write under a temporary name, then rename; the same figure gives the same bytes.

    Raises:
        ResultError: It cannot be written; what was there before is intact.
    """
    from buddy.plots.style import paper_style

    check_out(path)
    suffix = path.suffix.lower()
    drawn = BytesIO()
    with paper_style():
        figure.savefig(drawn, format=suffix[1:], metadata=_METADATA[suffix])
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        staging.write_bytes(drawn.getvalue())
        os.replace(staging, path)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        staging.unlink(missing_ok=True)
