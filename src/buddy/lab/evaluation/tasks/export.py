"""Training rows of evaluation tasks, asked as lm-eval asks and answered right."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from buddy.data.rows import Note, Row, read_rows, refused
from buddy.errors import DataError
from buddy.lab.evaluation.rouge.samsum import INSTRUCTION, read_dialogues

_QUESTION: Final = ("prompt", "instruction", "input")
SAMSUM: Final = "samsum"
"""Not a task of lm-eval: asked as `buddy eval rouge` does."""


def export_rows(
    names: Sequence[str],
    *,
    data_dir: Path | None,
    limit: int | None = None,
    seed: int = 0,
    without: Sequence[Row] = (),
    wrong: bool = False,
    on_task: Callable[[str, int], None] = lambda name, rows: None,
    note: Note = lambda text: None,
) -> list[Row]:
    """Rows for `data.examples`, those of all tasks in random order.

    Args:
        names: Tasks of lm-eval, and samsum.
        data_dir: With `TASK/train.jsonl`; the hub if None.
        limit: At most this many of each task, drawn at random; all if None.
        seed: Of the draw and the order.
        without: Rows whose questions are left out of what was drawn, as those that a model was
            trained on are when it is measured.
        wrong: Give the wrong answers too, under `wrong`, each with the prompt it is asked with.
        on_task: Told how many rows a task gave.
        note: Told of rows that have no prompt or no answer.

    Raises:
        DataError: A task is unknown, named twice or has no training rows, its data is missing or
            malformed, what it asks has no one right answer, or no row is left.
    """
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated or not names:
        what = f"named twice: {', '.join(repeated)}" if repeated else "none named"
        raise DataError(f"expected tasks to take rows from, each once, got {what}")
    loaded = _load([name for name in names if name != SAMSUM], data_dir)
    known = {_question(row) for row in without}
    rows: list[Row] = []
    for name in [*loaded, *(name for name in names if name == SAMSUM)]:
        if name == SAMSUM:
            mine = _samsum_rows(data_dir, limit, seed, note)
        else:
            mine = _task_rows(name, loaded[name], limit, seed, note, wrong)
        mine = [row for row in mine if _question(row) not in known]
        on_task(name, len(mine))
        rows += mine
    if not rows:
        raise DataError("no row is left: ask for more, or leave out fewer")
    random.Random(seed).shuffle(rows)
    return rows


def read_questions(path: Path) -> list[Row]:
    """Rows whose questions are to be left out: instruction, input or prompt; answers or none.

    Raises:
        DataError: The file cannot be read, or a row has no question.
    """
    rows = read_rows(path)
    for where, row in rows:
        for name in _QUESTION:
            if not isinstance(row.get(name), str | None):
                raise refused(where, name, "a text", row[name])
        if not any(_question(row)):
            raise DataError(f"{where} has no question: expected a prompt or an instruction")
    return [row for _, row in rows]


def _question(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(field) or "") for field in _QUESTION)


def _load(names: Sequence[str], data_dir: Path | None) -> dict[str, Any]:
    if not names:
        return {}
    from buddy.lab.evaluation.tasks.extra import require_lm_eval

    require_lm_eval()
    from buddy.lab.evaluation.tasks.loading import load_training

    return load_training(names, data_dir=data_dir)


def _samsum_rows(data_dir: Path | None, limit: int | None, seed: int, note: Note) -> list[Row]:
    dialogues = read_dialogues(data_dir, "train", limit=limit, seed=seed, note=note)
    return [
        {
            "instruction": f"{INSTRUCTION}\n\n{dialogue.text}",
            "output": dialogue.summary.strip(),
            "source": SAMSUM,
        }
        for dialogue in dialogues
    ]


def _task_rows(
    name: str, task: Any, limit: int | None, seed: int, note: Note, wrong: bool
) -> list[Row]:
    docs = task.training_docs()
    chosen: Sequence[int] = range(len(docs))
    if limit is not None and limit < len(docs):
        chosen = random.Random(seed).sample(chosen, limit)
    rows = []
    for place in chosen:
        (prompt, completion), others = ask_and_answer(task, docs[place])
        if prompt and completion:
            row: Row = {"prompt": prompt, "completion": completion, "source": name}
            if wrong and others:
                row["wrong"] = [{"prompt": asked, "completion": answer} for asked, answer in others]
            rows.append(row)
    if empty := len(chosen) - len(rows):
        note(f"{name}: of {len(chosen)} rows, {empty} with no prompt or answer left out")
    return rows


PromptAnswer = tuple[str, str]
"""The text that a model is given, and a continuation."""


def ask_and_answer(task: Any, doc: Any) -> tuple[PromptAnswer, list[PromptAnswer]]:
    """What lm-eval asks of a row, zero-shot: with the right continuation, and with each wrong one.

    Blanks at the end of the prompt go to the continuation, as lm-eval has it. A task without
    choices has no wrong continuation.

    Args:
        task: Of lm-eval.
        doc: A row, as the task prepares it.

    Raises:
        DataError: There is no one right answer.
    """
    context = task.fewshot_context(doc, 0, gen_prefix=task.doc_to_prefix(doc))
    if task.OUTPUT_TYPE == "multiple_choice":
        requests = task.construct_requests(doc, context)
        # Where the candidates stand in the prompt, lm-eval keeps the right one's place there.
        right = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        choices = task.doc_to_choice(doc)
        if isinstance(right, str):
            right = choices.index(right)
        if not isinstance(right, int):
            raise DataError(f"task {task.config.task} has several right answers: leave it out")
        asked = [_parted(*candidate.args) for candidate in requests[: len(choices)]]
        return asked[right], [candidate for place, candidate in enumerate(asked) if place != right]
    answer = task.doc_to_target(doc)
    if not isinstance(context, str) or not isinstance(answer, str):
        raise DataError(f"task {task.config.task} has no one right answer: leave it out")
    return _parted(context, f"{task.config.target_delimiter}{answer}"), []


def _parted(prompt: str, completion: str) -> PromptAnswer:
    bare = prompt.rstrip()
    return bare, prompt[len(bare) :] + completion
