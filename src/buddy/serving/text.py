"""Text of tokens as they come: no half characters, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Any, Final

_BROKEN: Final = "\ufffd"
_MOST_PENDING: Final = 4
"""A character of UTF-8 has at most four bytes, and a token at least one: what is still broken after
more tokens stays broken."""


class TokenText:
    """Turns tokens into text, one at a time.

    What it gives, put together, is what the tokenizer makes of all tokens at once.

    Args:
        tokenizer: Of the tokenizers library, as transformers wraps it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.backend_tokenizer.decode
        self._ids: list[int] = []
        """The last tokens: those before `_read` have been given, and are what others join to."""
        self._read = 0
        self._known = ""

    def push(self, token: int) -> str:
        """The new text; none where a character is not complete."""
        self._ids.append(token)
        text = self._decode(self._ids, skip_special_tokens=True)
        is_broken = text.endswith(_BROKEN) and len(self._ids) - self._read <= _MOST_PENDING
        if is_broken or len(text) <= len(self._known):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is left, broken or not."""
        return self._give(self._decode(self._ids, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        new = text[len(self._known) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._known = self._decode(self._ids, skip_special_tokens=True)
        return new


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
        found = [at for one in self._stop if (at := text.find(one)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        longest = max(_overlap(text, one) for one in self._stop)
        cut = len(text) - longest
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """What was held back for nothing."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with, and is longer than."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
