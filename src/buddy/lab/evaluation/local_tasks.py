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
        folder: Place under the data folder; each split is a file `SPLIT.jsonl` in it.
        fields: What lm-eval can take in each field of a row.
        split: What is evaluated.
        shots: Split that few-shot examples come from.
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
_ENDINGS: Final = FieldCheck(
    "a list of 2 texts or more", lambda value, row: _is_strings(value) and len(value) > 1
)
_FOUR_TEXTS: Final = FieldCheck(
    "a list of 4 texts", lambda value, row: _is_strings(value) and len(value) == 4
)
_TWO_WORDS: Final = FieldCheck(
    "a text of 2 words or more",
    lambda value, row: TEXT.fits(value, row) and " " in value.strip(),
)
_GAP: Final = FieldCheck(
    "a text with _ in it", lambda value, row: isinstance(value, str) and "_" in value
)


def _task(
    folder: str, split: str, shots: str | None = "train", /, **fields: FieldCheck
) -> LocalTask:
    return LocalTask(folder, fields, split, shots)


LOCAL_TASKS: Final = {
    "arc_challenge": _task("arc_challenge", "test", **_CHOICES),
    "arc_easy": _task("arc_easy", "test", **_CHOICES),
    "boolq": _task("boolq", "validation", question=TEXT, passage=TEXT, label=_one_of(0, 1)),
    "gsm8k": _task("gsm8k", "test", question=TEXT, answer=TEXT),
    "hellaswag": _task(
        "hellaswag",
        "validation",
        activity_label=STRING,
        ctx_a=TEXT,
        ctx_b=STRING,
        endings=_ENDINGS,
        label=_ENDING,
    ),
    "lambada_openai": _task("lambada_openai", "test", None, text=_TWO_WORDS),
    "mmlu": _task(
        "mmlu",
        "test",
        "dev",
        question=TEXT,
        subject=TEXT,
        choices=_FOUR_TEXTS,
        answer=_one_of(0, 1, 2, 3),
    ),
    "openbookqa": _task(
        "openbookqa",
        "test",
        question_stem=TEXT,
        choices=_CHOICES["choices"],
        answerKey=_CHOICES["answerKey"],
    ),
    "piqa": _task("piqa", "validation", goal=TEXT, sol1=STRING, sol2=STRING, label=_one_of(0, 1)),
    "social_iqa": _task(
        "siqa",
        "validation",
        context=TEXT,
        question=TEXT,
        **dict.fromkeys(("answerA", "answerB", "answerC"), STRING),
        label=_one_of("1", "2", "3", 1, 2, 3),
    ),
    "winogrande": _task(
        "winogrande",
        "validation",
        sentence=_GAP,
        option1=STRING,
        option2=STRING,
        answer=_one_of("1", "2"),
    ),
    "wikitext": _task("wikitext2", "validation", None, page=TEXT),
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
