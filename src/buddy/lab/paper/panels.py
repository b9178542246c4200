"""Lines and bars as records hold them, for the figures `panels` and `bars`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from buddy.lab.paper.published.read import NUM_BLOCKS

REMOVED: Final = "Blocks removed (%)"
Figure = Callable[[Any], float]
"""What a row of a table says of one axis."""


def line(
    label: str,
    rows: Sequence[Mapping[str, Any]],
    x: Figure,
    y: Figure,
    *,
    stderr: Callable[[Any], float | None] | None = None,
    paper: bool = False,
) -> dict[str, Any]:
    """One line of a panel; the same label is the same method, ours and the paper's.

    Args:
        label: Of the method.
        rows: Points of a record, or rows of the paper.
        x: Of a row.
        y: Of a row.
        stderr: Of a row; left out where one is not known.
        paper: Whether the paper reports it.
    """
    drawn: dict[str, Any] = {
        "label": label,
        "x": list(map(x, rows)),
        "y": list(map(y, rows)),
        "paper": paper,
    }
    errors = [None] if stderr is None else list(map(stderr, rows))
    return drawn if None in errors else {**drawn, "stderr": errors}


def panel(
    title: str, x_label: str, y_label: str, lines: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Axes with lines; those without a point are left out."""
    return {
        "title": title,
        "x_label": x_label,
        "y_label": y_label,
        "lines": [own for own in lines if own["x"]],
    }


def ran(point: Mapping[str, Any]) -> float:
    """Blocks of a token: the budget's, or the mean of what ran where none fixed them."""
    return float(point.get("mean_blocks", point["blocks"]))


def removed(point: Mapping[str, Any]) -> float:
    """The share of blocks that do not run at a point, in percent."""
    num_blocks = int(point["num_blocks"])
    return 100.0 * (num_blocks - ran(point)) / num_blocks


def removed_by(model: str) -> Figure:
    """The share of blocks that a row of the paper removes from one of its models, in percent."""
    return lambda row: 100.0 * int(row["removed"]) / NUM_BLOCKS[model]


def number(name: str, *, times: float = 1.0, over: float = 1.0) -> Figure:
    """A field of a row as a number, scaled."""
    return lambda row: times * float(row[name]) / over


percent: Final = number("value", times=100.0)
"""The value of a point, in percent."""


def percent_error(point: Mapping[str, Any]) -> float | None:
    """Its standard error, in percent."""
    error: float | None = point["stderr"]
    return error and 100 * error


def shown(point: Mapping[str, Any], digits: int = 1, sign: str = "") -> str:
    """The value in percent, with its standard error where that is known."""
    error = point["stderr"]
    text = f"{100 * point['value']:{sign}.{digits}f}"
    return f"{text} ± {100 * error:.{digits}f}" if error else text
