"""Payoff of drafts: how long one may be, by how often they were right and what they cost.

A drafted token pays where its chance to be accepted is more than what it adds to a pass. Chances
are learned for each length of match, in each text; what was seen is forgotten bit by bit, so that
drafts that did not pay are tried again. Nothing here changes a token of a text: drafts are
verified.
"""

from collections import deque
from collections.abc import Hashable
from statistics import median
from typing import Final

from buddy.generation.ngrams import LONGEST_MATCH

_STARTS: Final = ((1, 0.2), (2, 0.4), (3, 0.5), (LONGEST_MATCH // 2, 0.7), (LONGEST_MATCH, 0.9))
"""Shortest match of each kind, and what its chance is taken for before a draft of it was seen."""
_WEIGHT: Final = 3.0
"""Tokens that this chance counts as."""
_FORGET: Final = 0.01
"""Share of what was seen that each token forgets: half of it in 70 tokens."""
MARGIN: Final = 1.25
"""Times its cost that the chance of a drafted token must be."""
_FIRST_COST: Final = 0.1
"""What a token adds to a pass before it was measured; 1 = a pass without drafts."""
KEPT: Final = 16
"""Passes that a cost is the median of."""
_PLAIN_EVERY: Final = 32
"""Passes with drafts after which what a plain one takes is to be measured again."""
MOST_DRAFTED: Final = 8
"""Tokens of a draft: with one more, fewer than the compiled kernel attends together."""


class AcceptRate:
    """How often drafts of one kind were right in a text.

    Args:
        start: What the chance is taken for before any was seen.
        weight: Tokens that this counts as.
    """

    def __init__(self, start: float, weight: float = _WEIGHT) -> None:
        self._start, self._weight, self._right, self._seen = start, weight, 0.0, 0.0

    @property
    def chance(self) -> float:
        """The chance that the next drafted token is right."""
        return (self._right + self._start * self._weight) / (self._seen + self._weight)

    def add(self, drafted: int, accepted: int) -> None:
        """Take note of a draft: those that were accepted, and the one that was not."""
        self._right += accepted
        self._seen += accepted + (accepted < drafted)

    def forget(self, tokens: int) -> None:
        """So many tokens have come."""
        share = (1 - _FORGET) ** tokens
        self._right, self._seen = share * self._right, share * self._seen


class AcceptRates:
    """How often n-gram drafts of one text were right, by the length of their match."""

    def __init__(self) -> None:
        self._rates = [AcceptRate(start) for _, start in _STARTS]

    def chance(self, match: int) -> float:
        """The chance that the next token is what followed a match of so many tokens."""
        return self._rates[_kind(match)].chance

    def add(self, match: int, drafted: int, accepted: int) -> None:
        """Take note of a draft: those that were accepted, and the one that was not."""
        self._rates[_kind(match)].add(drafted, accepted)

    def forget(self, tokens: int) -> None:
        """So many tokens have come."""
        for rate in self._rates:
            rate.forget(tokens)


def _kind(match: int) -> int:
    return max(kind for kind, (least, _) in enumerate(_STARTS) if match >= least)


class DraftCost:
    """What a drafted token adds to a pass, as a share of what the pass takes without drafts.

    Kinds of passes that cost differently, such as by their rows, are measured apart.
    """

    def __init__(self) -> None:
        self._plain: dict[Hashable, deque[float]] = {}
        self._added: dict[Hashable, deque[float]] = {}
        self._since_plain: dict[Hashable, int] = {}

    def add(self, kind: Hashable, drafted: int, seconds: float) -> None:
        """Take note of a pass.

        Args:
            kind: Of pass.
            drafted: Tokens that it verified, all together; 0 = it was a plain one.
            seconds: That it took.
        """
        plain = self._plain.setdefault(kind, deque(maxlen=KEPT))
        self._since_plain[kind] = self._since_plain.get(kind, 0) + 1 if drafted else 0
        if not drafted:
            plain.append(seconds)
        elif plain:
            added = self._added.setdefault(kind, deque(maxlen=KEPT))
            added.append((seconds / median(plain) - 1) / drafted)

    def of_token(self, kind: Hashable, first: float = _FIRST_COST) -> float:
        """What a drafted token adds; 1 = as much as a pass.

        Args:
            kind: Of pass.
            first: What it is taken for before one was measured.
        """
        added = self._added.get(kind)
        return max(median(added), 0.0) if added else first

    def plain_s(self, kind: Hashable) -> float | None:
        """Seconds of a pass without drafts; None = it is time to measure one."""
        plain = self._plain.get(kind)
        if not plain or self._since_plain[kind] >= _PLAIN_EVERY:
            return None
        return median(plain)


def draft_length(chance: float, cost: float, rows: int, most: int = MOST_DRAFTED) -> int:
    """Tokens of a draft that pay.

    A pass makes a token of each row. So a drafted one pays where it comes, in the place of others,
    in less of a pass than they do.

    Args:
        chance: That a token is right whose forerunners are.
        cost: What a drafted token adds to the pass, as `DraftCost` says it.
        rows: Of the pass.
        most: Tokens of the draft.
    """
    length, reached, least = 0, chance, MARGIN * cost * rows
    while length < most and reached > least:
        length, reached = length + 1, reached * chance
    return length
