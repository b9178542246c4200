"""The rows of all running requests, and rows of past ones whose beginning others may share.

A token's keys and values depend on the tokens up to it and on the blocks that each of them ran. So
what was computed for a prompt serves another request that begins with the same tokens under the
same plan, and no other.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buddy.budget.source import ConstantBudget
from buddy.engine.state.session import Session


@dataclass(frozen=True, slots=True)
class Fed:
    """What a row has been fed.

    Attributes:
        tokens: [tokens], ids.
        runs: [tokens, blocks], what each of them ran.
        owner: Who may begin with it: whether a prompt is here tells what somebody else has asked.
    """

    tokens: NDArray[np.int64]
    runs: NDArray[np.bool_]
    owner: str = ""

    def shared(self, prompt: NDArray[np.int64], runs: NDArray[np.bool_]) -> int:
        """How many tokens it has in common with a prompt whose tokens all run these blocks."""
        count = common(self.tokens, prompt)
        if count:
            others = (self.runs[:count] != runs).any(1).nonzero()[0]
            count = int(others[0]) if len(others) else count
        return count


def common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Length of the beginning that two texts share."""
    count = min(len(one), len(other))
    differ = (one[:count] != other[:count]).nonzero()[0]
    return int(differ[0]) if len(differ) else count


class Pool:
    """Sequences of a session: those of requests, and kept ones that others may begin with.

    Args:
        session: Holds all of them.
        most_kept: Sequences that are kept when their request has ended; the one that was of use
            least recently goes first. 0 = none.
        most_tokens: Tokens that these have, all together.
        least_shared: Tokens below which a beginning is computed anew.
    """

    def __init__(
        self, session: Session, most_kept: int, most_tokens: int, least_shared: int
    ) -> None:
        self.session, self._most_tokens = session, most_tokens
        self.most_kept, self.least_shared = most_kept, max(1, least_shared)
        self._kept: OrderedDict[int, Fed] = OrderedDict()

    @property
    def kept(self) -> int:
        """Sequences that are kept."""
        return len(self._kept)

    @property
    def kept_tokens(self) -> int:
        """Tokens of these; may be asked from any thread."""
        return sum(len(fed.tokens) for fed in tuple(self._kept.values()))

    def find(
        self, prompt: NDArray[np.int64], runs: NDArray[np.bool_], owner: str = ""
    ) -> tuple[int, int]:
        """The owner's sequence that shares most with a prompt under a plan, and how many tokens."""
        lengths = (
            (fed.shared(prompt, runs), number)
            for number, fed in self._kept.items()
            if fed.owner == owner
        )
        length, number = max(lengths, default=(0, -1))
        return number, length

    def join(self, blocks: int, begin: tuple[int, int] = (-1, 0)) -> int:
        """A sequence for a request.

        Args:
            blocks: Its tokens may run.
            begin: The number of the sequence that it begins as, and tokens that the two share.
        """
        number, length = begin
        if length == 0:
            return self.session.join(ConstantBudget(blocks))
        if number in self._kept:
            self._kept.move_to_end(number)
        return self.session.branch(number, length, ConstantBudget(blocks))

    def leave(self, number: int, fed: Fed | None) -> None:
        """The request of a sequence has ended.

        Args:
            number: Of the sequence.
            fed: What it was fed, where others may begin with it.
        """
        gone = [number]
        if fed is not None and self.most_kept and len(fed.tokens) >= self.least_shared:
            covers = [n for n, other in self._kept.items() if _begins(fed, other)]
            if not any(_begins(other, fed) for other in self._kept.values()):
                gone = covers
                self._kept[number] = fed
        for sequence in gone:
            self._kept.pop(sequence, None)
        while len(self._kept) > self.most_kept or self.kept_tokens > self._most_tokens:
            gone.append(self._kept.popitem(last=False)[0])
        if gone:
            self.session.leave(*gone)


def _begins(longer: Fed, shorter: Fed) -> bool:
    """Whether all of the shorter is how the longer begins."""
    count = len(shorter.tokens)
    return (
        longer.owner == shorter.owner
        and count <= len(longer.tokens)
        and np.array_equal(longer.tokens[:count], shorter.tokens)
        and np.array_equal(longer.runs[:count], shorter.runs)
    )
