"""Text of tokens as they come: no half characters, and nothing of a stop string."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from buddy.serving.overlap import overlap

_BROKEN: Final = "\ufffd"
_WINDOW: Final = 16
_LONGEST: Final = 4
"""Tokens that a character of UTF-8 may have: each has at least one of its bytes."""


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens of a tokenizer that are no text."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(number for number, token in added.items() if token.special)


class TokenText:
    """Turns tokens into text, one at a time.

    What it gives, put together, is what the tokenizer makes of all tokens at once. For a character
    that is cut off a decoder writes U+FFFD: once, or for each of its bytes, and then also for whole
    characters in the same run of bytes. So all but the U+FFFD at the end is sure.

    Args:
        tokenizer: Of the tokenizers library, as transformers wraps it.
        before: Tokens that the text goes on from. A decoder may take the space off a first word.
        shown: Special tokens that are written out.

    Attributes:
        length: Characters that have been given in all.
    """

    def __init__(
        self, tokenizer: Any, before: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> None:
        self._decode = tokenizer.backend_tokenizer.decode
        self._special = special_tokens(tokenizer)
        self._shown = shown & self._special
        self._ids: list[int] = []
        """The last tokens: some that have been given, which others join to, and the open ones."""
        self._read = 0
        """Where the next such window begins."""
        self._given = 0
        """Characters of the window that have been given."""
        self.length = 0
        before = [token for token in before if token not in self._special]
        for first in range(1, min(len(before), _WINDOW) + 1):
            text = self._text(before[-first:])
            if text and not text.endswith(_BROKEN):
                self._ids, self._read, self._given = list(before[-first:]), first, len(text)
                break

    def push(self, token: int) -> str:
        """The new text; none of a special token, or where a character is not complete."""
        if token in self._shown:
            mark = str(self._decode([token], skip_special_tokens=False))
            before = self.flush()
            self.length += len(mark)
            return before + mark
        if token in self._special:  # it would push what is not complete out of the window
            return ""
        self._ids.append(token)
        text = self._text(self._ids)
        sure = len(text.rstrip(_BROKEN))
        new = text[self._given : sure]
        self._given += len(new)
        if sure == len(text) and new:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._given = len(self._text(self._ids))
        elif len(self._ids) > _WINDOW:
            new += self._let_go(text)
        self.length += len(new)
        return new

    def flush(self) -> str:
        """What is left, broken or not."""
        text = self._text(self._ids)
        new, self._given = text[self._given :], len(text)
        self.length += len(new)
        return new

    def _let_go(self, text: str) -> str:
        """What is too old to become a character, broken as it is; the window begins after it."""
        ids, self._ids = self._ids, self._ids[-_LONGEST:]
        old = self._text(ids[:-_LONGEST])
        new = old[self._given :]
        left = len(text) - max(self._given, len(old))
        self._read = len(self._ids)
        self._given = max(0, len(self._text(self._ids)) - left)
        return new

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._decode(ids, skip_special_tokens=True))


class StopStrings:
    """Holds back what may begin a stop string, and ends the text before the first one.

    Args:
        stop: The strings; none is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What is sure to be text, and whether a stop string has come."""
        if not self._stop:
            return text, False
        text = self._held + text
        places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        longest = max(overlap(text, stop) for stop in self._stop)
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held
