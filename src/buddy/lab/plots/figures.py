"""The table of figures, and the one way to draw any of them."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from buddy.errors import ResultError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN_INCHES: Final = 3.3
"""A paper's column."""

_TASKS: Final = ("eval-tasks", "eval-rouge", "eval-gsm8k", "eval-mmlu")


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureEntry:
    """What a figure reads; its module in this package has its name and a function `draw`."""

    kinds: tuple[str, ...]
    """Kinds of record; a star matches anything."""
    options: tuple[str, ...] = ()
    """What can be chosen, besides width and title."""

    def reads(self, kind: object) -> bool:
        """Whether records of this kind can be drawn."""
        return any(fnmatchcase(str(kind), pattern) for pattern in self.kinds)


FIGURES: Final[dict[str, FigureEntry]] = {
    "accuracy": FigureEntry(kinds=(*_TASKS, "reproduce-accuracy"), options=("task", "metric")),
    "perplexity": FigureEntry(kinds=("eval-ppl", "eval-tasks"), options=("task", "metric")),
    "heatmap": FigureEntry(kinds=(*_TASKS, "eval-ppl", "reproduce-heatmap"), options=("task",)),
    "ranks": FigureEntry(kinds=("observe-ranks", "reproduce-observations")),
    "context": FigureEntry(kinds=("observe-context", "reproduce-observations")),
    "speed": FigureEntry(kinds=("eval-speed",)),
    "breakdown": FigureEntry(kinds=("eval-speed", "reproduce-breakdown")),
    "importance": FigureEntry(kinds=("importance-*",)),
    "predictor": FigureEntry(kinds=("training-budget", "reproduce-grpo")),
    "comparison": FigureEntry(kinds=("comparison",), options=("task",)),
    "retention": FigureEntry(kinds=(*_TASKS, "reproduce-retention"), options=("metric",)),
    "panels": FigureEntry(kinds=("reproduce-*",)),
    "bars": FigureEntry(kinds=("reproduce-*",)),
    "load": FigureEntry(kinds=("serving-load",)),
}


def draw(
    figure: str,
    records: Sequence[dict[str, Any]],
    *,
    width: float = COLUMN_INCHES,
    title: str | None = None,
    **options: str | None,
) -> "Figure":
    """Draw a figure by name.

    Args:
        figure: One of `FIGURES`.
        records: As `buddy.records.read_record` gives them.
        width: In inches, 2 to 20.
        title: Above the figure; None for none, as papers have captions.
        options: Those of the figure's entry; None means not chosen.

    Raises:
        ResultError: No such figure, an option that it has not, records that it cannot draw, or
            no matplotlib.
    """
    if figure not in FIGURES:
        raise ResultError(f"no figure {figure!r}: expected one of {', '.join(FIGURES)}")
    chosen = {name: value for name, value in options.items() if value is not None}
    known = FIGURES[figure].options
    for name in chosen:
        if name not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ResultError(f"the {figure} figure has no {name} to choose: {has}; leave it out")
    try:
        module = importlib.import_module(f"buddy.lab.plots.draw.{figure}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ResultError(
            'figures need matplotlib, which is not installed: pip install "buddy-llm[plots]"'
        ) from error
    drawn: Figure = module.draw(records, width=width, title=title, **chosen)
    return drawn
