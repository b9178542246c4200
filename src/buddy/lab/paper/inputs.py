"""Prompts and their answers: of Alpaca, of SAMSum, and of tasks as evaluation words them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from buddy.data.examples import Example, Source, read_examples
from buddy.files import write_text

if TYPE_CHECKING:
    from buddy.data.examples import Template
    from buddy.data.rows import Row

ALPACA_HUB: Final = "yahma/alpaca-cleaned"
ALPACA_FILE: Final = "alpaca/train"
ALPACA_ROWS: Final = 51_760
"""Rows of the paper's training set: it names Alpaca, and links the cleaned one."""
SAMSUM: Final = "samsum"
ALPACA: Final = "alpaca"
MOST_TOKENS: Final = 1024


def template_of(tokenizer: Any) -> "Template":
    """How an instruction is put: in the model's own chat template where it has one."""
    return "alpaca" if tokenizer.chat_template is None else "chat"


def alpaca_source(data_dir: Path | None, tokenizer: Any, start: int, stop: int | None) -> Source:
    """Rows of Alpaca, from a folder or the hub."""
    template = template_of(tokenizer)
    if data_dir is None:
        return Source(hub=ALPACA_HUB, start=start, stop=stop, template=template)
    path = str(data_dir / f"{ALPACA_FILE}.jsonl")
    return Source(path=path, start=start, stop=stop, template=template)


def read_alpaca(
    data_dir: Path | None, tokenizer: Any, rows: int | None, longest: int
) -> list[Example]:
    """Alpaca's first rows.

    Args:
        data_dir: With `alpaca/train.jsonl`; the hub if None.
        tokenizer: Of the model.
        rows: All if None.
        longest: Prompt and answer in tokens; longer answers are cut, longer prompts left out.

    Raises:
        DataError: The data is missing or malformed.
    """
    return read_examples(alpaca_source(data_dir, tokenizer, 0, rows), tokenizer, max_tokens=longest)


def read_samsum(
    data_dir: Path | None, tokenizer: Any, rows: int | None, longest: int
) -> list[Example]:
    """Dialogues of the validation split, asked as `buddy eval rouge` asks; as `read_alpaca`."""
    from buddy.lab.evaluation.rouge.samsum import prompt_ids, read_dialogues

    examples = []
    for dialogue in read_dialogues(data_dir, limit=rows):
        prompt = prompt_ids(tokenizer, dialogue.text)
        answer = tokenizer(dialogue.summary, add_special_tokens=False, verbose=False)["input_ids"]
        if answer and len(prompt) < longest:
            examples.append(Example(tuple(prompt), tuple(answer[: longest - len(prompt)]), SAMSUM))
    return examples


def read_tasks(
    names: Sequence[str],
    data_dir: Path | None,
    tokenizer: Any,
    rows: int | None,
    longest: int,
    file: Path,
) -> list[Example]:
    """Questions that are evaluated, with no examples before them, and their right answers.

    Args:
        names: Tasks of lm-eval.
        data_dir: With `TASK/SPLIT.jsonl`; the hub if None.
        tokenizer: Of the model.
        rows: Of each task, and of each subject of MMLU.
        longest: As `read_alpaca`.
        file: Where the rows are written, as JSON lines.

    Raises:
        DataError: The data is missing or malformed.
    """
    from buddy.lab.evaluation.tasks.export import ask_and_answer
    from buddy.lab.evaluation.tasks.extra import require_lm_eval

    require_lm_eval()
    from buddy.lab.evaluation.tasks.loading import load_tasks

    loaded = load_tasks(names, data_dir=data_dir, fewshot=0, limit=rows)
    rows_made: list[Row] = []
    for name, task in loaded["tasks"].items():
        for doc in list(task.eval_docs)[:rows]:
            (prompt, completion), _ = ask_and_answer(task, doc)
            if prompt and completion.strip():
                source = "mmlu" if name.startswith("mmlu_") else name
                rows_made.append({"prompt": prompt, "completion": completion, "source": source})
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows_made))
    return read_examples(Source(path=str(file)), tokenizer, max_tokens=longest)
