"""Benchmark data in a local folder, in place of the hub: JSON lines in lm-eval's field names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from buddy.data.rows import STRING, TEXT, FieldCheck, Row, check_fields, read_rows


@dataclass(frozen=True, slots=True)
class LocalTask:
    """Where a task's rows are, and what a row must have.

    Attributes:
        folder: Under the data folder; each split is a file `SPLIT.jsonl` in it.
        fields: Of every row, and what lm-eval can take in each.
        split: That is evaluated.
        shots: That few-shot examples come from.
    """

    folder: str
    fields: Mapping[str, FieldCheck]
    split: str
    shots: str | None


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_choices(value: Any, row: Row) -> bool:
    if not isinstance(value, dict):
        return False
    texts, labels = value.get("text", ()), value.get("label", ())
    return _is_strings(texts) and _is_strings(labels) and len(texts) == len(labels) > 1


def _one_of(*values: int | str) -> FieldCheck:
    # A bool equals 0 or 1, and lm-eval looks up by type: 1 and "1" differ.
    allowed = {(type(value), value) for value in values}
    return FieldCheck(
        f"one of {', '.join(map(repr, values))}",
        lambda value, row: isinstance(value, int | str) and (type(value), value) in allowed,
    )


_CHOICES: Final = {
    "question": TEXT,
    "choices": FieldCheck("an object with text and label, lists of as many texts", _is_choices),
    "answerKey": FieldCheck(
        "one of the labels of choices", lambda value, row: value in row["choices"]["label"]
    ),
}
_ENDING: Final = FieldCheck(
    "the place of an ending, from 0",
    lambda value, row: str(value) in map(str, range(len(row["endings"]))),
)
LOCAL_TASKS: Final = {
    "arc_challenge": LocalTask("arc_challenge", _CHOICES, "test", "train"),
    "arc_easy": LocalTask("arc_easy", _CHOICES, "test", "train"),
    "boolq": LocalTask(
        "boolq", {"question": TEXT, "passage": TEXT, "label": _one_of(0, 1)}, "validation", "train"
    ),
    "gsm8k": LocalTask("gsm8k", {"question": TEXT, "answer": TEXT}, "test", "train"),
    "hellaswag": LocalTask(
        "hellaswag",
        {
            "activity_label": STRING,
            "ctx_a": TEXT,
            "ctx_b": STRING,
            "endings": FieldCheck(
                "a list of 2 texts or more",
                lambda value, row: _is_strings(value) and len(value) > 1,
            ),
            "label": _ENDING,
        },
        "validation",
        "train",
    ),
    "lambada_openai": LocalTask(
        "lambada_openai",
        {
            "text": FieldCheck(
                "a text of 2 words or more",
                lambda value, row: TEXT.fits(value, row) and " " in value.strip(),
            )
        },
        "test",
        None,
    ),
    "mmlu": LocalTask(
        "mmlu",
        {
            "question": TEXT,
            "subject": TEXT,
            "choices": FieldCheck(
                "a list of 4 texts", lambda value, row: _is_strings(value) and len(value) == 4
            ),
            "answer": _one_of(0, 1, 2, 3),
        },
        "test",
        "dev",
    ),
    "openbookqa": LocalTask(
        "openbookqa",
        {"question_stem": TEXT, "choices": _CHOICES["choices"], "answerKey": _CHOICES["answerKey"]},
        "test",
        "train",
    ),
    "piqa": LocalTask(
        "piqa",
        {"goal": TEXT, "sol1": STRING, "sol2": STRING, "label": _one_of(0, 1)},
        "validation",
        "train",
    ),
    "social_iqa": LocalTask(
        "siqa",
        {
            "context": TEXT,
            "question": TEXT,
            "answerA": STRING,
            "answerB": STRING,
            "answerC": STRING,
            "label": _one_of("1", "2", "3", 1, 2, 3),
        },
        "validation",
        "train",
    ),
    "winogrande": LocalTask(
        "winogrande",
        {
            "sentence": FieldCheck(
                "a text with _ in it", lambda value, row: isinstance(value, str) and "_" in value
            ),
            "option1": STRING,
            "option2": STRING,
            "answer": _one_of("1", "2"),
        },
        "validation",
        "train",
    ),
    "wikitext": LocalTask("wikitext2", {"page": TEXT}, "validation", None),
}


def read_split(
    data_dir: Path, folder: str, split: str, fields: Mapping[str, FieldCheck]
) -> list[Row]:
    """The rows of one split, of these fields alone.

    Raises:
        DataError: The file is missing or empty, or a row is no JSON, lacks a field or holds
            something else in it.
    """
    rows = read_rows(data_dir / folder / f"{split}.jsonl")
    return [check_fields(where, row, fields) for where, row in rows]
