"""Lines and bars as records hold them, for the figures `panels` and `bars`."""

from collections.abc import Sequence
from typing import Any


def line(
    label: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    stderr: Sequence[float | None] | None = None,
    paper: bool = False,
) -> dict[str, Any]:
    """One line of a panel; the same label is the same method, ours and the paper's."""
    made: dict[str, Any] = {"label": label, "x": list(x), "y": list(y), "paper": paper}
    if stderr is not None and all(one is not None for one in stderr):
        made["stderr"] = list(stderr)
    return made


def panel(
    title: str, x_label: str, y_label: str, lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Axes with lines; those without a point are left out."""
    return {
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "lines": [one for one in lines if one["x"]],
    }


REMOVED = "Blocks removed (%)"


def removed(blocks: int | float, num_blocks: int) -> float:
    """The share of blocks that do not run, in percent."""
    return 100.0 * (num_blocks - blocks) / num_blocks
