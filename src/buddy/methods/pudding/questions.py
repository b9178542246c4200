"""Questions: a prompt, its right answer, and the wrong ones it is told from, as tokens."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from buddy.data.examples import Encode, Example, Source, encoder, load_rows, row_source
from buddy.data.rows import Note, Row, refused
from buddy.errors import DataError

WRONG: Final = "wrong"
"""Field of a row: its wrong answers, each an object as the row is one, with a prompt of its own."""


@dataclass(frozen=True, slots=True)
class Question:
    """A right answer and wrong ones.

    Attributes:
        right: Prompt and right answer.
        wrong: The same for each wrong answer; none where the row has none.
    """

    right: Example
    wrong: tuple[Example, ...] = ()

    @property
    def source(self) -> str:
        """Name of the task, file or data set that it comes from."""
        return self.right.source


def read_questions(
    sources: Iterable[Source], tokenizer: Any, *, max_tokens: int, note: Note = lambda text: None
) -> list[Question]:
    """The questions of some sources, in their order; none is cut short.

    A row is left out if its prompt or an answer is empty, or a prompt with an answer longer than
    `max_tokens`.

    Args:
        sources: Files or hub data sets. Rows are as `read_examples` takes them; `buddy data
            --wrong` adds their wrong answers.
        tokenizer: Of the model.
        max_tokens: Of prompt and answer together.
        note: Told of rows that give no question.

    Raises:
        DataError: Rows are missing or malformed, or none is left.
    """
    return [one for source in sources for one in _read(source, tokenizer, max_tokens, note)]


def _read(source: Source, tokenizer: Any, max_tokens: int, note: Note) -> list[Question]:
    rows = load_rows(source)[source.start : source.stop]
    encode = encoder(source.template, tokenizer)
    found, left_out = [], Counter[str]()
    for where, row in rows:
        task = row_source(row, where, source)
        asked = [_example(encode, one, where, task) for one in (row, *_wrong(row, where))]
        if any(not one.prompt or not one.answer for one in asked):
            left_out["an empty prompt or answer"] += 1
        elif any(one.num_tokens > max_tokens for one in asked):
            left_out[f"more than {max_tokens} tokens"] += 1
        else:
            found.append(Question(asked[0], tuple(asked[1:])))
    name = source.path or source.hub
    reasons = ", ".join(f"{count} with {reason}" for reason, count in left_out.items())
    if not found:
        raise DataError(
            f"{name} has no usable row from {source.start} to {source.stop or 'its end'}: "
            f"{reasons or 'it ends before'}"
        )
    if left_out:
        note(f"{name}: of {len(rows)} rows, {reasons} left out")
    return found * source.repeat


def _wrong(row: Row, where: str) -> list[Row]:
    found = row.get(WRONG, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise refused(where, WRONG, "a list of objects with prompt and completion", found)
    return found


def _example(encode: Encode, row: Row, where: str, task: str) -> Example:
    prompt, answer = encode(row, where)
    return Example(tuple(prompt), tuple(answer), task)
