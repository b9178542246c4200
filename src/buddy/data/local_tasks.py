"""Benchmark data in a local folder, in place of the hub: JSON lines in lm-eval's field names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from buddy.data.rows import Row, read_rows


@dataclass(frozen=True, slots=True)
class LocalTask:
    """Where a task's rows are, and what a row must have.

    Attributes:
        folder: Under the data folder; each split is a file `SPLIT.jsonl` in it.
        fields: Of every row.
        split: That is evaluated.
        shots: That few-shot examples come from.
    """

    folder: str
    fields: tuple[str, ...]
    split: str
    shots: str | None


_CHOICES = ("question", "choices", "answerKey")
LOCAL_TASKS: Final = {
    "arc_challenge": LocalTask("arc_challenge", _CHOICES, "test", "train"),
    "arc_easy": LocalTask("arc_easy", _CHOICES, "test", "train"),
    "boolq": LocalTask("boolq", ("question", "passage", "label"), "validation", "train"),
    "gsm8k": LocalTask("gsm8k", ("question", "answer"), "test", "train"),
    "hellaswag": LocalTask(
        "hellaswag",
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        "validation",
        "train",
    ),
    "lambada_openai": LocalTask("lambada_openai", ("text",), "test", None),
    "mmlu": LocalTask("mmlu", ("question", "subject", "choices", "answer"), "test", "dev"),
    "openbookqa": LocalTask(
        "openbookqa", ("question_stem", "choices", "answerKey"), "test", "train"
    ),
    "piqa": LocalTask("piqa", ("goal", "sol1", "sol2", "label"), "validation", "train"),
    "social_iqa": LocalTask(
        "siqa",
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        "validation",
        "train",
    ),
    "winogrande": LocalTask(
        "winogrande", ("sentence", "option1", "option2", "answer"), "validation", "train"
    ),
    "wikitext": LocalTask("wikitext2", ("page",), "validation", None),
}


def read_split(data_dir: Path, folder: str, split: str, fields: tuple[str, ...]) -> list[Row]:
    """The rows of one split.

    Raises:
        DataError: The file is missing or empty, or a row is no JSON or lacks a field.
    """
    return read_rows(data_dir / folder / f"{split}.jsonl", fields)
