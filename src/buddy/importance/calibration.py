"""Calibration text: a named corpus or a text file cut into windows, or answers to prompts."""

from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.data.rows import MAX_DATA_BYTES, Note
from buddy.data.tokens import begin_of_text
from buddy.errors import ResultError
from buddy.files import read_text as read_whole

CORPORA: Final = {"wikitext2": "wikitext2/valid.txt", "ptb": "ptb/valid.txt"}
"""Named corpora, and the file of each in a data folder: their validation splits."""


def read_text(source: str, data_dir: Path | None = None) -> str:
    """The text of a named corpus, or of a file.

    Raises:
        ResultError: No such corpus or file, or nothing in it.
    """
    path = Path(source)
    if source in CORPORA:
        if data_dir is None:
            raise ResultError(
                f"corpus {source} needs --data-dir, the folder with {CORPORA[source]}; "
                "or give a text file"
            )
        path = data_dir / CORPORA[source]
    try:
        text = read_whole(path, ResultError, most=MAX_DATA_BYTES)
    except ResultError as error:
        raise ResultError(
            f"calibration text {error}; expected a UTF-8 text file or one of {', '.join(CORPORA)}"
        ) from error
    if not text.strip():
        raise ResultError(f"calibration text {path} is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def cut_windows(
    tokenizer: Any,
    text: str,
    *,
    tokens: int,
    limit: int | None = None,
    note: Note = lambda text: None,
) -> Int[Tensor, "windows tokens"]:
    """Tokenise and cut into whole windows from the start; the rest is left out.

    Each window begins as the tokenizer begins a text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: Of any length.
        tokens: Of each window.
        limit: At most this many windows.
        note: Told where the text fills fewer.

    Raises:
        ResultError: The text does not fill one window.
    """

    def ids_of(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    begin = begin_of_text(tokenizer)
    width = tokens - len(begin)
    # Only as much text as can be needed: a token is rarely more than 16 characters.
    needed = len(text) if limit is None else width * limit
    ids = ids_of(text[: 16 * needed])
    if len(ids) <= needed and 16 * needed < len(text):  # rarely; the last may be cut in two
        ids = ids_of(text)
    count = len(ids) // width if limit is None else min(limit, len(ids) // width)
    if count == 0:
        raise ResultError(
            f"the calibration text has {len(ids)} tokens, less than one window of {tokens}: "
            "give more text or shorter windows"
        )
    if limit is not None and count < limit:
        note(f"the text fills {count} of the {limit} windows of {tokens} tokens asked for")
    cut = torch.tensor(ids[: count * width]).view(count, width)
    return torch.cat([torch.tensor(begin, dtype=cut.dtype).expand(count, -1), cut], dim=1)
