"""A figure as a file: PNG, PDF or SVG by its suffix, whole or not at all."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from buddy.errors import ResultError
from buddy.files import check_writable, write_bytes

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
    check_writable(path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write under a temporary name, then rename; the same figure gives the same bytes.

    Raises:
        ResultError: It cannot be written; what was there before is intact.
    """
    from buddy.lab.plots.style import paper_style

    check_out(path)
    suffix = path.suffix.lower()
    drawn = BytesIO()
    with paper_style():
        figure.savefig(drawn, format=suffix[1:], metadata=_METADATA[suffix])
    write_bytes(path, drawn.getvalue())
