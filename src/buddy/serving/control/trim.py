"""The slow loop: lowers the cap on depth where tokens come late, and raises it otherwise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

WINDOW_S: Final = 0.5
LATE: Final = 1.0
"""95th percentile, as a share of the target, above which the cap is lowered."""
EARLY: Final = 0.8
"""Below this for two windows the cap is raised."""
ENOUGH: Final = 20
"""Times between tokens that are judged together."""
FEW: Final = 4
"""The same, where all of them come early."""
_MOST_PUT_OFF: Final = 4
"""Windows after which fewer are judged all the same."""


@dataclass(slots=True)
class Trim:
    """A cap on the depth of elastic rows, in blocks.

    The cap falls by a block where a few tokens come late, and by more where half of them do; it
    rises by more where nearly all come early. That is half of what would close the gap if time were
    proportional to depth. So full depth is back within seconds when a load is gone, and a machine
    that stalls for a moment costs little. A few tokens have no percentiles: they wait for more.
    """

    least: int
    most: int
    cap: int = field(init=False)
    _early: int = field(init=False, default=0)
    _closes_s: float = field(init=False, default=-math.inf)
    _ratios: list[float] = field(init=False, default_factory=list)
    _put_off: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.cap = self.most

    def reset(self) -> None:
        """Begin anew, with no cap."""
        self.cap, self._early, self._put_off = self.most, 0, 0
        self._ratios.clear()

    def add(self, gaps_s: Sequence[float], target_s: float) -> None:
        """Note times between tokens, and what they should have been at most."""
        self._ratios += [gap / target_s for gap in gaps_s]

    def close(self, now_s: float, depth: int) -> bool:
        """Move the cap at the end of a window.

        Args:
            now_s: The time.
            depth: Blocks that elastic rows may run by all that is known: a cap above it would not
                be felt.

        Returns:
            Whether a window has ended.
        """
        if now_s < self._closes_s:
            return False
        missed = 0 if self._closes_s == -math.inf else int((now_s - self._closes_s) / WINDOW_S)
        self._closes_s = now_s + WINDOW_S
        needed = FEW if percentile(self._ratios, 1.0) < EARLY else ENOUGH
        if 0 < len(self._ratios) < needed and self._put_off < _MOST_PUT_OFF:
            self._put_off += 1
            return True
        late, half = percentile(self._ratios, 0.95), percentile(self._ratios, 0.5)
        self._ratios.clear()
        self._put_off = 0
        if late > LATE:
            self._early = 0
            down = max(1, int((half - LATE) * depth / 2))
            self.cap = max(self.least, min(self.cap, depth) - down)
        elif late < EARLY:
            self._early += 1 + missed
            if self._early >= 2:
                up = max(1, int((EARLY - late) * self.most / 2))
                self.cap = min(self.most, self.cap + up)
                self._early = 1 if late < EARLY / 2 else 0
        else:
            self._early = 0
        return True


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank; 0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[math.ceil(share * len(values)) - 1]
