"""Drafts of rows of a server: whom they change nothing for but the time that it takes."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from buddy.errors import is_failure
from buddy.generation.pass_drafter import PassDrafter
from buddy.generation.shallow import DraftedRow, ShallowPasses

if TYPE_CHECKING:
    from buddy.serving.rows.row import Row

_LOG: Final = logging.getLogger(__name__)
Drafts = dict[int, list[int]]
"""Tokens that are drafted for rows, by the rows' numbers."""
NO_DRAFTS: Final[Drafts] = {}


class SurvivedPasses(ShallowPasses):
    """Passes of few blocks that end where one fails: the pass that feeds the rows tells them."""

    def lengthen(self, *args: Any) -> None:
        """Let drafts go on, as far as no pass fails."""
        try:
            super().lengthen(*args)
        except BaseException as error:
            if not is_failure(error):
                raise
            _LOG.warning("a pass that drafts by few blocks has failed: %s", error)


class RowDrafter:
    """Drafts for the rows of passes that feed answers alone.

    Args:
        passes: Of few blocks.
        steady_lanes: Tokens of a pass in which a seed holds in company; 0 = none.
    """

    def __init__(self, passes: SurvivedPasses, steady_lanes: int) -> None:
        self._passes, self._steady_lanes = passes, steady_lanes
        self._drafter = PassDrafter(passes, steady_lanes)
        self.measured = self._drafter.measured

    def draft(self, decoding: Sequence["Row"], *, allows_passes: bool) -> Drafts:
        """Tokens for the rows that are drafted for.

        Args:
            decoding: Rows that are to decode together.
            allows_passes: Whether passes of few blocks may come before.
        """
        numbers, rows = list[int](), list[DraftedRow]()
        for row in decoding:
            seen = self._seen(row)
            if seen is not None:
                numbers.append(row.number)
                rows.append(seen)
        depths = [row.depth for row in decoding]
        drafts = self._drafter.draft(rows, depths, allows_passes=allows_passes)
        return {number: tokens for number, tokens in zip(numbers, drafts, strict=True) if tokens}

    def report(self) -> dict[str, Any]:
        """What passes of few blocks took since it was last asked, as a `StepReport` has it."""
        taken = {"draft_s": self._passes.seconds, "draft_blocks": self._passes.blocks}
        self._passes.seconds, self._passes.blocks = 0.0, 0
        return taken

    def _seen(self, row: "Row") -> DraftedRow | None:
        """A row as its drafter sees it; None where it is not drafted for."""
        drafter = row.drafter
        if drafter is None or row.sequence is None or (row.is_seeded and not self._steady_lanes):
            return None
        blocks = drafter.blocks
        if blocks is not None and (row.budget_source is not None or blocks >= row.depth):
            blocks = None  # they would save nothing of what its tokens run
        room = row.request.max_tokens - len(row.answer) - 1
        return DraftedRow(row.sequence, row.last, room, drafter, blocks, row.is_seeded)
