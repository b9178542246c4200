"""SAMSum: dialogues to summarise, and how a model is asked for it."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from buddy.data.examples import encode_chat
from buddy.data.rows import STRING, FieldCheck, Note
from buddy.data.tokens import encode
from buddy.errors import DataError, reason
from buddy.lab.evaluation.local_tasks import read_split

INSTRUCTION: Final = "Summarize the following dialogue in one or two short sentences."
HUB_ID: Final = "knkarthick/samsum"
"""The data set's first home on the hub, Samsung/samsum, is gone."""
_FIELDS: Final = {
    "id": FieldCheck("a text or a number", lambda value, row: type(value) in (str, int)),
    "dialogue": STRING,
    "summary": STRING,
}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A chat, and what a person made of it."""

    id: str
    text: str
    summary: str


def read_dialogues(
    data_dir: Path | None,
    split: str = "validation",
    *,
    limit: int | None = None,
    seed: int = 0,
    note: Note = lambda text: None,
) -> list[Dialogue]:
    """Dialogues of a split that have a summary.

    Args:
        data_dir: With `samsum/SPLIT.jsonl`; the hub if None.
        split: train, validation or test.
        limit: At most this many, drawn at random.
        seed: Of the draw.
        note: Told of rows that lack either text.

    Raises:
        DataError: The data is missing, empty, lacks a field or holds something else in it.
    """
    rows = read_split(data_dir, "samsum", split, _FIELDS) if data_dir else _from_hub(split)
    dialogues = [
        Dialogue(str(row["id"]), row["dialogue"], row["summary"])
        for row in rows
        if (row["dialogue"] or "").strip() and (row["summary"] or "").strip()
    ]
    if not dialogues:
        raise DataError(f"samsum, split {split}: no row has a dialogue and a summary")
    if empty := len(rows) - len(dialogues):
        note(f"samsum: of {len(rows)} rows, {empty} with no dialogue or summary left out")
    if limit is None or limit >= len(dialogues):
        return dialogues
    return random.Random(seed).sample(dialogues, limit)


def _from_hub(split: str) -> list[dict[str, Any]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return list(load_dataset(HUB_ID, split=split))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise DataError(
            f"split {split!r} of {HUB_ID} cannot be had from the hub: {reason(error)}; give a "
            "local folder with samsum/SPLIT.jsonl in it by --data-dir"
        ) from error


def has_chat(tokenizer: Any) -> bool:
    """Whether the model is asked in its own form of a conversation."""
    return tokenizer.chat_template is not None


def prompt_ids(
    tokenizer: Any, dialogue: str, variables: Mapping[str, Any] = MappingProxyType({})
) -> list[int]:
    """The tokens that ask for a summary; variables are the chat template's."""
    asked = f"{INSTRUCTION}\n\n{dialogue}"
    if not has_chat(tokenizer):
        return encode(tokenizer, f"{asked}\n\nSummary:")
    return encode_chat(tokenizer, asked, **variables)


def read_answer(tokenizer: Any, token_ids: list[int]) -> str:
    """The summary in what was generated; without a chat template, its first line of text."""
    text = str(tokenizer.decode(token_ids, skip_special_tokens=True)).strip()
    return text if has_chat(tokenizer) else text.partition("\n")[0].strip()
