"""Depth drafts: tokens by blocks of a low budget, for several rows together, where that pays.

A pass of few blocks drafts a token of each row that takes part. It is worth its time where these
tokens are likelier to be right than what the pass, and their verification, take of a plain one.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Final

from buddy.engine.executors.protocol import Executor
from buddy.generation.payoff import KEPT, MARGIN

DRAFTED_WORDS: Final = 0.25
"""The share of the token ids that drafts are made of, where an executor saves by it. Byte-pair
encodings number frequent tokens first (SmolLM2's first quarter has 90 % of the tokens of Alpaca's
answers), and the output projection is a third of a draft's work in a small model."""
LEAST_CHANCE: Final = 0.5
"""A draft ends where the product of its tokens' highest probabilities falls below.

In greedy decoding it estimates the chance that all of them are accepted; a token that is likely to
be thrown away is not worth drafting.
"""
FIRST_CHANCE: Final = 0.8
"""What a drafted token's chance to be right is taken for before any was seen."""
FIRST_WEIGHT: Final = 12.0
"""Tokens that this counts as: it is not far above what pays, and one wrong draft says little."""
_RETRY: Final = 256
"""Times that a cost is asked for, and not measured, before it is forgotten."""


def num_words(executor: Executor | None, vocab: int) -> int:
    """How many token ids drafts are made of, from the first on."""
    saves = executor is not None and executor.makes_some_logits
    return math.ceil(vocab * DRAFTED_WORDS) if saves else vocab


class ShallowCost:
    """What passes of few blocks take, by their kind."""

    def __init__(self) -> None:
        self._taken: dict[Hashable, deque[float]] = {}
        self._asked: dict[Hashable, int] = {}

    def add(self, kind: Hashable, seconds: float) -> None:
        """Take note of a pass."""
        self._taken.setdefault(kind, deque(maxlen=KEPT)).append(seconds)
        self._asked[kind] = 0

    def seconds(self, kind: Hashable, first: float) -> float:
        """The time of a pass.

        One that seemed too dear is measured again after a while: it may have been disturbed.

        Args:
            kind: Of pass.
            first: What it is taken for before one was measured.
        """
        self._asked[kind] = self._asked.get(kind, 0) + 1
        if self._asked[kind] > _RETRY:
            self._taken.pop(kind, None)
        taken = self._taken.get(kind)
        return median(taken) if taken else first


def places_that_pay(
    chances: Sequence[float], pass_cost: float, token_cost: float, rows: int
) -> list[int]:
    """Places of the rows that one more pass of few blocks is to draft for; none if it costs more.

    A plain pass makes a token of each of its rows. So drafted tokens pay where as many come, in the
    place of others, in less of a pass than they do.

    Args:
        chances: Of each row that may be drafted for, that its next drafted token is right.
        pass_cost: What the pass of few blocks takes; 1 = as long as a plain one of all rows.
        token_cost: What a drafted token adds to the pass that verifies it, on that scale.
        rows: Of the plain pass.
    """
    least = MARGIN * token_cost * rows
    places = [place for place, chance in enumerate(chances) if chance > least]
    gain = sum(chances[place] - least for place in places)
    return places if gain > MARGIN * pass_cost * rows else []
