"""Drafter of one text among others: its n-grams, and a low budget where these say nothing."""

from collections.abc import Collection, Iterable

from buddy.generation.depth_drafts import FIRST_CHANCE, FIRST_WEIGHT
from buddy.generation.drafter import NgramDrafter
from buddy.generation.payoff import AcceptRate


class TextDrafter:
    """What a text is drafted from, and how often that was right.

    Args:
        tokens: Of the text so far.
        ngrams: Whether what followed before is drafted.
        blocks: Of the passes that draft for it where n-grams do not; None = none do.
        never: Tokens that no draft holds.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        ngrams: bool,
        blocks: int | None = None,
        never: Collection[int] = (),
    ) -> None:
        self.blocks, self.never = blocks, never
        self._ngrams = NgramDrafter(tokens, never) if ngrams else None
        self._rate, self._drafted = AcceptRate(FIRST_CHANCE, FIRST_WEIGHT), 0

    def add(self, token: int) -> None:
        """Go on by a token."""
        self._rate.forget(1)
        if self._ngrams is not None:
            self._ngrams.add(token)

    def draft(self, cost: float, rows: int, most: int) -> list[int]:
        """What its n-grams say that it goes on with, none or more tokens; see `NgramDrafter`."""
        self._drafted = 0
        return [] if self._ngrams is None else self._ngrams.draft(cost, rows, most)

    @property
    def chance(self) -> float:
        """The chance that a token which few blocks draft is right."""
        return self._rate.chance

    def drafted(self, tokens: int) -> None:
        """Few blocks have drafted so many tokens, in the place of n-grams that said nothing."""
        self._drafted = tokens

    def judged(self, accepted: int) -> None:
        """So many tokens of its last draft were right, and the next one was not."""
        if self._drafted:
            self._rate.add(self._drafted, accepted)
        elif self._ngrams is not None:
            self._ngrams.judged(accepted)
