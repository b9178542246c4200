"""Drafter of a pass: how its rows may go on, by n-grams of their texts or few blocks, if it pays.

Rows are drafted for side by side, each as long as it pays for. A pass verifies what was drafted,
and a row takes of it what it would have chosen anyway.
"""

from collections.abc import Sequence

from buddy.engine.executors.native.decoder import MOST_LANES
from buddy.generation import depth_drafts
from buddy.generation.payoff import MOST_DRAFTED, DraftCost
from buddy.generation.shallow import DraftedRow, ShallowDraft, ShallowPasses


class PassDrafter:
    """Drafts for rows of passes that feed answers alone, and learns what that costs.

    Args:
        passes: Of few blocks.
        steady_lanes: Tokens of a pass in which a seed holds in company; 0 = none.
    """

    def __init__(self, passes: ShallowPasses, steady_lanes: int = 0) -> None:
        self._passes, self._steady_lanes = passes, steady_lanes
        self._cost, self._shallow_cost = DraftCost(), depth_drafts.ShallowCost()
        self._pass: tuple[tuple[int, int], int] | None = None
        self._shallow_s = 0.0

    def draft(
        self, rows: Sequence[DraftedRow], depths: Sequence[int], *, allows_passes: bool = True
    ) -> list[list[int]]:
        """Tokens for rows, none or more for each.

        All tokens of the pass together are no more than have logits made where they are computed.

        Args:
            rows: Those that are drafted for.
            depths: Blocks of all rows that the pass feeds, on which it depends what it costs.
            allows_passes: Whether passes of few blocks may come before.
        """
        self._pass, self._shallow_s = None, 0.0
        if not rows:
            return []
        kind = len(depths), sum(depths)
        most, cost = min(MOST_DRAFTED, MOST_LANES // len(depths) - 1), self._cost.of_token(kind)
        drafts = [row.drafter.draft(cost, len(depths), min(most, row.room)) for row in rows]
        if allows_passes and (plain_s := self._cost.plain_s(kind)) is not None:
            self._by_few_blocks(
                [
                    ShallowDraft(row, row.blocks, min(most, row.room), tokens)
                    for row, tokens in zip(rows, drafts, strict=True)
                    if row.blocks is not None and not tokens
                ],
                depths,
                plain_s,
                self._cost.of_token(kind, first=0.0),  # else a pass of many rows is never tried
            )
        self._pass = kind, sum(map(len, drafts))
        return drafts

    def measured(self, seconds: float) -> None:
        """What was drafted last took so long to be drafted and verified, with all that follows."""
        if self._pass is not None:
            self._cost.add(*self._pass, seconds - self._shallow_s)

    def _by_few_blocks(
        self, drafts: list[ShallowDraft], depths: Sequence[int], plain_s: float, cost: float
    ) -> None:
        """Lengthen drafts that n-grams say nothing of.

        Args:
            drafts: Without a token.
            depths: Blocks of all rows.
            plain_s: That a pass without drafts takes.
            cost: What a drafted token adds to it, as a share.
        """
        if len(drafts) > self._steady_lanes:  # they may be computed elsewhere than a seed's tokens
            drafts = [draft for draft in drafts if not draft.row.is_seeded]
        deepest = max(depths)

        def choose(live: Sequence[ShallowDraft]) -> list[ShallowDraft]:
            share = max((draft.blocks for draft in live), default=0) / deepest
            seconds = self._shallow_cost.seconds(_kind(live), share * plain_s)
            places = depth_drafts.places_that_pay(
                [draft.chance for draft in live], seconds / plain_s, cost, len(depths)
            )
            return [live[place] for place in places]

        def measured(live: Sequence[ShallowDraft], seconds: float) -> None:
            self._shallow_cost.add(_kind(live), seconds)
            self._shallow_s += seconds

        if drafts:
            self._passes.lengthen(drafts, choose, measured)
        for draft in drafts:
            draft.row.drafter.drafted(len(draft.tokens))


def _kind(drafts: Sequence[ShallowDraft]) -> tuple[int, int]:
    """The kind of a pass of few blocks, which says what it costs."""
    return len(drafts), sum(draft.blocks for draft in drafts)
