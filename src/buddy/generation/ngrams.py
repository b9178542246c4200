"""N-gram drafts: what followed the last tokens where they stood in the text before.

Summaries, edits and extraction copy from their prompt. So the tokens that followed the latest
earlier place that ends as the text ends now are a guess of what comes next, which costs no pass.

Source: prompt lookup decoding (Saxena, 2023); LLMA (Yang et al., 2023).
"""

from collections.abc import Iterable
from typing import Final

LONGEST_KEY: Final = 4
"""Tokens of the longest ends that are looked up; a longer match is found from one of these."""
LONGEST_MATCH: Final = 16
"""Tokens beyond which a match is as good as any."""


class NgramIndex:
    """Finds where the end of a text stood before; a token more takes the same time in any text.

    Args:
        tokens: Of the text so far: the prompt, and what was fed of the answer.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(LONGEST_KEY))
        self._found = 0, 0
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, token: int) -> None:
        """Go on by a token."""
        tokens = self._tokens
        tokens.append(token)
        stop, found = len(tokens), (0, 0)
        for size, ends in enumerate(self._ends[:stop], start=1):
            key = tuple(tokens[stop - size :])
            before = ends.get(key)
            if before is not None:
                found = before, size
            ends[key] = stop
        self._found = found

    @property
    def match(self) -> int:
        """Tokens of the end that stood before, 0 to `LONGEST_MATCH`."""
        place, size = self._found
        tokens, most = self._tokens, min(place, LONGEST_MATCH)
        if size == LONGEST_KEY:
            while size < most and tokens[place - size - 1] == tokens[-size - 1]:
                size += 1
        return size

    def propose(self, most: int) -> list[int]:
        """What followed there; where the text ends within, it goes on as from its beginning.

        Args:
            most: Tokens that are drafted, if the end stood before.
        """
        place, size = self._found
        if not size:
            return []
        drafted = self._tokens[place : place + most]
        while len(drafted) < most:  # what followed overlaps with the end: it repeats itself
            drafted.append(drafted[place - len(self._tokens)])
        return drafted
