"""A load: the rows of a pass, as the search for a depth needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buddy.serving.control.protocol import RowView, StepShape


@dataclass(frozen=True, slots=True)
class Load:
    """The rows of a pass, as the search for a depth needs them; prompts count as if they decoded.

    Attributes:
        bounds: Least and most blocks of each row.
        contexts: Tokens that each will look at.
    """

    bounds: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, rows: Sequence[RowView], bounds: Sequence[tuple[int, int]]) -> "Load":
        """Rows, each with the least and the most that it may run."""
        return cls(tuple(bounds), tuple(row.context + row.prompt_left + 1 for row in rows))

    def with_row(self, depth: int, context: int) -> "Load":
        """The same load with one row more."""
        return Load((*self.bounds, (depth, depth)), (*self.contexts, context))

    def shape(self, cap: int, prompt_lanes: int) -> StepShape:
        """A step under a cap, and tokens of prompts that are fed along."""
        depths = [
            least if cap < least else most if cap > most else cap for least, most in self.bounds
        ]
        return StepShape.of_rows(
            depths, self.contexts, prompt_lanes=prompt_lanes, prompt_depth=min(cap, max(depths))
        )

    def rows_that_fit(self, most: int, fits: Callable[[StepShape], bool]) -> int:
        """Rows like these, at their least, of which a step fits."""
        num = len(self.bounds)
        if not num:
            return most
        depth = max(1, round(sum(least for least, _ in self.bounds) / num))
        context = sum(self.contexts) // num
        return greatest(
            1, most, lambda rows: fits(StepShape.of_rows([depth] * rows, [context] * rows))
        )


def greatest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The greatest number up to `high` that fits, where all below it do; `low` where none does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
