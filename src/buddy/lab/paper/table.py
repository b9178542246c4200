"""What a table of the paper is to this package, and what comes out when it is made again."""

from collections.abc import Iterable, Mapping
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
"""Files of the eight tasks, under a data folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One table or figure of the paper."""

    shows: str
    """What it is about, in a few words."""
    module: str
    """Its name in `buddy.lab.paper.tables`; its function `collect` makes the table."""
    minutes: float
    """How long the quick settings take, on the default model and two cores."""
    measured: bool = True
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
    """Those of `buddy plot` that are drawn from the record."""
    differs: str
    """One sentence: what differs from the paper, whatever the model."""

    @property
    def needs(self) -> str:
        """The data in a few words, and what the model must have."""
        folders = list(dict.fromkeys(file.partition("/")[0] for file in self.files))
        tasks = [file.partition("/")[0] for file in COMMONSENSE_FILES]
        if set(tasks) <= set(folders):
            folders = ["the eight tasks", *(folder for folder in folders if folder not in tasks)]
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

    @classmethod
    def of(cls, title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> "Sheet":
        """A sheet from cells that are texts, or are shown as `str` shows them."""
        texts = tuple(tuple(map(str, row)) for row in rows)
        return cls(title=title, columns=tuple(columns), rows=texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """A table that was made again."""

    results: Mapping[str, Any]
    """Results of the record."""
    sheets: tuple[Sheet, ...]
    """What the terminal shows."""
    facts: Mapping[str, Any] | None
    """What records say of the model; None where several were measured."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What was chosen for this table."""
    differs: str = ""
    """What else differs from the paper this time: a sentence, or nothing."""
