"""Plans that recur: all blocks of a plan as one graph, in the place of one for each block.

A plan that sequences keep, or that is everybody's, comes again at every step. Once it has come some
times it is captured whole. Few are kept for each arena: those that came last.
"""

from collections.abc import Callable, Hashable
from typing import Final

import numpy as np

from buddy.depth.plan import DepthPlan

Replay = Callable[[], None]
_TIMES: Final = 16
"""How often a plan has come when it is captured: by then it has cost about as much in launches as
capturing does (an estimate), so that plans that never come again cost at most twice as much."""
_MOST: Final = 16
"""Plans that are remembered, captured or not."""


class BlockOrder:
    """What a step does with neighbouring blocks, whichever rows do it.

    Args:
        blocks: The neighbours.
        plan: Of each lane; None = every lane runs them.

    Attributes:
        runs: Blocks that some lane runs, ascending.
        enters: By block that some lane skips, the number of the residual that enters it; blocks
            between which none runs share it.
    """

    def __init__(self, blocks: range, plan: DepthPlan | None) -> None:
        self.blocks, self.runs, self.enters = blocks, list(blocks), dict[int, int]()
        if plan is None:
            return
        runs = np.logical_or.reduce(plan.host)
        skips = ~np.logical_and.reduce(plan.host)
        self.runs = [block for block in blocks if runs[block]]
        number, is_new = -1, True
        for block in blocks:
            if skips[block]:
                number, is_new = number + is_new, False
                self.enters[block] = number
            is_new = is_new or bool(runs[block])

    @property
    def key(self) -> Hashable:
        """Equal for equal work."""
        return self.blocks, tuple(self.runs), tuple(self.enters.items())


class RecurringPlans:
    """Counts plans, and keeps what those that recur were captured as."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int | Replay] = {}

    def find(self, key: Hashable, capture: Callable[[], Replay]) -> Replay | None:
        """What a plan was captured as, now or earlier; None while it has not come often enough.

        Args:
            key: Tells it from others.
            capture: Called where it has.
        """
        known = self._known.pop(key, 0)
        if isinstance(known, int):
            known = known + 1 if known + 1 < _TIMES else capture()
        self._known[key] = known
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        return None if isinstance(known, int) else known
