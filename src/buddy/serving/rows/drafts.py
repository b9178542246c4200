"""Drafts of rows: how each may go on, guessed from its own text or by few blocks, where that pays.

Rows are drafted for side by side, each as long as it pays for. A pass verifies what was drafted,
and a row takes of it what it would have chosen anyway.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from buddy.engine.executors.native.decoder import MOST_LANES
from buddy.generation.depth_drafts import ShallowCost, places_that_pay
from buddy.generation.payoff import MOST_DRAFTED, DraftCost
from buddy.serving.rows.shallow import ShallowDraft, ShallowPasses

if TYPE_CHECKING:
    from buddy.serving.rows.row import Row

Drafts = dict[int, list[int]]
"""Tokens that are drafted for rows, by the rows' numbers."""
NO_DRAFTS: Final[Drafts] = {}


class RowDrafter:
    """Drafts for the rows of passes that feed answers alone, and learns what that costs.

    Args:
        passes: Of few blocks.
        steady_lanes: Tokens of a pass in which a seed holds in company; 0 = none.
    """

    def __init__(self, passes: ShallowPasses, steady_lanes: int) -> None:
        self._passes, self._steady_lanes = passes, steady_lanes
        self._cost, self._shallow_cost = DraftCost(), ShallowCost()
        self._pass: tuple[tuple[int, int], int] | None = None
        self._shallow_s = 0.0

    def draft(self, decoding: Sequence["Row"], *, allows_passes: bool) -> Drafts:
        """Tokens for the rows that are drafted for.

        All tokens of the pass together are no more than have logits made where they are computed.

        Args:
            decoding: Rows that are to decode together.
            allows_passes: Whether passes of few blocks may come before.
        """
        self._pass, self._shallow_s = None, 0.0
        drafting = [row for row in decoding if self._is_drafted_for(row)]
        if not drafting:
            return NO_DRAFTS
        rows, drafts = len(decoding), Drafts()
        kind = rows, sum(row.depth for row in decoding)  # what a pass costs depends on these
        most, cost = min(MOST_DRAFTED, MOST_LANES // rows - 1), self._cost.of_token(kind)
        for row in drafting:
            assert row.drafter is not None
            if drafted := row.drafter.draft(cost, rows, min(most, _left(row))):
                drafts[row.number] = drafted
        if allows_passes and (plain_s := self._cost.plain_s(kind)) is not None:
            others = [row for row in drafting if row.number not in drafts]
            drafts |= self._by_few_blocks(others, decoding, most, plain_s, cost)
        self._pass = kind, sum(map(len, drafts.values()))
        return drafts

    def measured(self, seconds: float) -> None:
        """What was drafted last took so long to be drafted and verified, with all that follows."""
        if self._pass is not None:
            self._cost.add(*self._pass, seconds - self._shallow_s)

    def report(self) -> dict[str, Any]:
        """What passes of few blocks took since it was last asked, as a `StepReport` has it."""
        taken = {"draft_s": self._passes.seconds, "draft_blocks": self._passes.blocks}
        self._passes.seconds, self._passes.blocks = 0.0, 0
        return taken

    def _is_drafted_for(self, row: "Row") -> bool:
        """Whether drafts change nothing but the time that a row takes."""
        return row.drafter is not None and (not row.is_seeded or self._steady_lanes > 0)

    def _by_few_blocks(
        self,
        rows: Sequence["Row"],
        decoding: Sequence["Row"],
        most: int,
        plain_s: float,
        cost: float,
    ) -> Drafts:
        """Tokens for rows that n-grams say nothing of.

        Args:
            rows: These rows.
            decoding: All that decode.
            most: Tokens of a draft.
            plain_s: That a pass without drafts takes.
            cost: What a drafted token adds to it, as a share.
        """
        drafts = [
            ShallowDraft(row, blocks, min(most, _left(row)), row.drafter.chance)
            for row in rows
            if row.drafter is not None and (blocks := _blocks(row)) is not None
        ]
        if len(drafts) > self._steady_lanes:  # they may be computed elsewhere than a seed's tokens
            drafts = [draft for draft in drafts if not draft.row.is_seeded]
        deepest = max(row.depth for row in decoding)

        def choose(live: Sequence[ShallowDraft]) -> list[ShallowDraft]:
            share = max((draft.blocks for draft in live), default=0) / deepest
            seconds = self._shallow_cost.seconds(_kind(live), share * plain_s)
            chances = [draft.sure * draft.chance for draft in live]
            places = places_that_pay(chances, seconds / plain_s, cost, len(decoding))
            return [live[place] for place in places]

        def measured(live: Sequence[ShallowDraft], seconds: float) -> None:
            self._shallow_cost.add(_kind(live), seconds)
            self._shallow_s += seconds

        if drafts:
            self._passes.lengthen(drafts, choose, measured)
        for draft in drafts:
            assert draft.row.drafter is not None
            draft.row.drafter.drafted(len(draft.tokens))
        return {draft.row.number: draft.tokens for draft in drafts if draft.tokens}


def _left(row: "Row") -> int:
    """Tokens of an answer that may be drafted: the pass that verifies them makes one itself."""
    return row.request.max_tokens - len(row.answer) - 1


def _blocks(row: "Row") -> int | None:
    """Blocks that draft for a row; None where they would save nothing of what its tokens run."""
    assert row.drafter is not None
    blocks = row.drafter.blocks
    if blocks is None or row.budget_source is not None or blocks >= row.depth:
        return None
    return blocks


def _kind(drafts: Sequence[ShallowDraft]) -> tuple[int, int]:
    """The kind of a pass of few blocks, which says what it costs."""
    return len(drafts), sum(draft.blocks for draft in drafts)
