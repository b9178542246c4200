"""Drafts of rows: how each may go on, guessed from its own text, where that pays.

Rows are drafted for side by side, each as long as it pays for. A pass verifies what was drafted,
and a row takes of it what it would have chosen anyway.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from buddy.engine.executors.native.decoder import MOST_LANES
from buddy.generation.payoff import MOST_DRAFTED, DraftCost

if TYPE_CHECKING:
    from buddy.serving.rows.row import Row

Drafts = dict[int, list[int]]
"""Tokens that are drafted for rows, by the rows' numbers."""
NO_DRAFTS: Final[Drafts] = {}


class RowDrafter:
    """Drafts for the rows of passes that feed answers alone, and learns what that costs."""

    def __init__(self) -> None:
        self._cost = DraftCost()
        self._pass: tuple[tuple[int, int], int] = (0, 0), 0

    def draft(self, decoding: Sequence["Row"], drafting: Sequence["Row"]) -> Drafts:
        """Tokens for the rows that are drafted for.

        All tokens of the pass together are no more than have logits made where they are computed.

        Args:
            decoding: Rows that are to decode together.
            drafting: Those of them that are drafted for.
        """
        rows, drafts = len(decoding), dict[int, list[int]]()
        kind = rows, sum(row.depth for row in decoding)  # what a pass costs depends on these
        most, cost = min(MOST_DRAFTED, MOST_LANES // rows - 1), self._cost.of_token(kind)
        for row in drafting:
            left = row.request.max_tokens - len(row.answer) - 1  # the pass makes one itself
            assert row.drafter is not None
            if drafted := row.drafter.draft(cost, rows, min(most, left)):
                drafts[row.number] = drafted
        self._pass = kind, sum(map(len, drafts.values()))
        return drafts

    def measured(self, seconds: float) -> None:
        """What was drafted last took so long to be verified, with all that follows."""
        self._cost.add(*self._pass, seconds)
