"""What a table of the paper is to this package, and what comes out when it is made again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Needs = Literal["any", "router", "predictor"]
"""What the model must have."""

COMMONSENSE_FILES: Final = (
    "openbookqa/test",
    "piqa/validation",
    "boolq/validation",
    "siqa/validation",
    "hellaswag/validation",
    "arc_easy/test",
    "arc_challenge/test",
    "winogrande/validation",
)
"""Of the eight tasks, under a data folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table or figure of the paper."""

    shows: str
    """In a few words."""
    module: str
    """In `buddy.lab.paper.tables`; its function `collect` makes the table."""
    minutes: float
    """Of the quick settings, on the default model and two cores."""
    measured: bool
    """Whether `minutes` was measured; else it is an estimate."""
    full: str
    """What the paper's settings mean."""
    files: tuple[str, ...] = ()
    """That a data folder must hold; without `.jsonl`, or with another suffix."""
    from_hub: bool = True
    """Whether the data come from the hub where no folder is named."""
    model: Needs = "any"
    """What the model must have."""
    methods: bool = False
    """Whether `--method` adds rows."""
    rows: bool = True
    """Whether `--rows` changes how much is run."""
    figures: tuple[str, ...]
    """Of `buddy plot`, drawn from the record."""
    differs: str
    """One sentence: what differs from the paper, whatever the model."""

    @property
    def needs(self) -> str:
        """The data in a few words, and what the model must have."""
        folders = list(dict.fromkeys(file.partition("/")[0] for file in self.files))
        tasks = [one.partition("/")[0] for one in COMMONSENSE_FILES]
        if set(tasks) <= set(folders):
            folders = ["the eight tasks", *(one for one in folders if one not in tasks)]
        parts = folders + ([] if self.model == "any" else [f"a {self.model}"])
        return ", ".join(parts) or "no data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table as a terminal shows it: texts alone."""

    title: str
    columns: tuple[str, ...]
    """The first one has names, the others numbers."""
    rows: tuple[tuple[str, ...], ...]
    """One text a column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A table that was made again."""

    results: Mapping[str, Any]
    """Of the record."""
    sheets: tuple[Sheet, ...]
    """What the terminal shows."""
    facts: Mapping[str, Any] | None
    """Of the model, as records name it; None where several were measured."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was chosen for this table."""
    differs: str = ""
    """What else differs from the paper this time: a sentence, or nothing."""
