"""Drafter of one text: what it may go on with, by its own n-grams, as long as that pays."""

from collections.abc import Collection, Iterable
from itertools import takewhile

from buddy.generation.ngrams import NgramIndex
from buddy.generation.payoff import MOST_DRAFTED, AcceptRates, draft_length


class NgramDrafter:
    """A text, and how often it went on as before.

    Args:
        tokens: Of the text so far.
        never: Tokens that no draft holds.
    """

    def __init__(self, tokens: Iterable[int], never: Collection[int] = ()) -> None:
        self._never = never
        self._index, self._rates = NgramIndex(tokens), AcceptRates()
        self._drafted = self._match = 0

    def __len__(self) -> int:
        """The number of its tokens."""
        return len(self._index)

    def add(self, token: int) -> None:
        """Go on by a token."""
        self._index.add(token)
        self._rates.forget(1)

    def draft(self, cost: float, rows: int = 1, most: int = MOST_DRAFTED) -> list[int]:
        """What it may go on with, none or more tokens.

        Args:
            cost: What a drafted token adds to a pass, as a share of it.
            rows: That the pass has, which make a token each.
            most: Tokens that are wanted.
        """
        self._match, drafted = self._index.match, list[int]()
        if self._match:
            length = draft_length(self._rates.chance(self._match), cost, rows, most)
            proposed = self._index.propose(length)
            drafted = list(takewhile(lambda token: token not in self._never, proposed))
        self._drafted = len(drafted)
        return drafted

    def judged(self, accepted: int) -> None:
        """So many tokens of its last draft were right, and the next one was not."""
        if self._drafted:
            self._rates.add(self._match, self._drafted, accepted)
