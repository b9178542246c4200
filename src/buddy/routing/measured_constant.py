"""The constant budget that a Budget Predictor was measured against, and which of the two won."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from buddy.errors import PolicyError, shown
from buddy.settings import Range, check_ranges

SURE: Final = 2.0
"""Standard errors by which a predictor must be ahead of the constant to count as better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredConstant:
    """The best budgets that depend on no prompt, chosen on training rows; JSON in a checkpoint.

    Raises:
        PolicyError: A number of blocks is below 1, or a figure out of range.
    """

    blocks: Annotated[int, Range(1, 1024)]
    """Blocks for every prompt."""
    by_kind: dict[str, int]
    """Blocks for the prompts of each source of training rows."""
    rows: Annotated[int, Range(2, 10**9)]
    """Prompts that predictor and constant were compared on; neither was fitted to them."""
    gain: float
    """Mean reward of the predictor's choices less that of `blocks`."""
    error: Annotated[float, Range(0)]
    """Standard error of `gain`, over prompts."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        for kind, blocks in self.by_kind.items():
            if not 1 <= blocks <= 1024 or not kind.isprintable():
                raise PolicyError(
                    "by_kind must have printable names, and 1 to 1,024 blocks for each, got "
                    f"{shown(kind)}: {shown(blocks)}"
                )

    @property
    def is_as_good(self) -> bool:
        """Whether the predictor is not ahead of it for sure."""
        return self.gain <= SURE * self.error

    @property
    def most_blocks(self) -> int:
        """The largest of its budgets."""
        return max(self.blocks, *self.by_kind.values())

    @property
    def note(self) -> str:
        """What stands in brackets behind `auto`, where it is as good; else nothing."""
        return (
            f" (a constant {self.blocks} blocks is as good: buddy info)" if self.is_as_good else ""
        )

    def describe(self) -> str:
        """Who is ahead by how much, and each kind's constant, in one line."""
        compared = f"{self.gain:+.3f} ± {self.error:.3f} over {self.rows} prompts"
        kinds = ", ".join(f"{kind} {blocks}" for kind, blocks in self.by_kind.items())
        if not self.is_as_good:
            return f"worth {compared} above a constant {self.blocks} blocks"
        return f"a constant {self.blocks} blocks is as good ({compared}); by kind: {kinds}"

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)
