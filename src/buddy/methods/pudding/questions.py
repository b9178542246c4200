"""Questions: a prompt, its right answer, and the wrong ones it is told from, as tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from buddy.data.examples import Encode, Example, Source, encoder, row_source, usable_rows
from buddy.data.rows import Note, Row, refused

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
    return [
        question
        for source in sources
        for question in _read(source, tokenizer, max_tokens, note) * source.repeat
    ]


def _read(source: Source, tokenizer: Any, max_tokens: int, note: Note) -> list[Question]:
    encode = encoder(source.template, tokenizer)

    def read(where: str, row: Row) -> Question | str:
        task = row_source(row, where, source)
        right, *wrong = [_example(encode, each, where, task) for each in (row, *_wrong(row, where))]
        if any(not example.prompt or not example.answer for example in (right, *wrong)):
            return "an empty prompt or answer"
        if any(example.num_tokens > max_tokens for example in (right, *wrong)):
            return f"more than {max_tokens} tokens"
        return Question(right, tuple(wrong))

    return usable_rows(source, read, note)


def _wrong(row: Row, where: str) -> list[Row]:
    wrong = row.get(WRONG, [])
    if not isinstance(wrong, list) or not all(isinstance(each, dict) for each in wrong):
        raise refused(where, WRONG, "a list of objects with prompt and completion", wrong)
    return wrong


def _example(encode: Encode, row: Row, where: str, task: str) -> Example:
    prompt, answer = encode(row, where)
    return Example(tuple(prompt), tuple(answer), task)
