"""How a server's requests are run side by side."""

from dataclasses import dataclass
from typing import Annotated

from buddy.engine.steer import BatchRoute, check_batch_route
from buddy.errors import BuddyError
from buddy.settings import Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class BatcherOptions:
    """How requests are run side by side."""

    rows: Annotated[int, Range(1, 1024)] = 16
    """Requests that run at once."""
    batch_route: BatchRoute = "shared"
    """Whose scores rank the blocks of a pass; a request with a seed is always routed apart."""
    kept_prefixes: Annotated[int, Range(0, 1024)] = 8
    """Past sequences that others may begin with; 0 = none."""
    least_shared: Annotated[int, Range(1, 2**20)] = 16
    """Tokens below which a beginning is computed anew."""
    slots: Annotated[int, Range(1, 2**20)] = 256
    """Tokens of a row that there is room for at first."""

    def __post_init__(self) -> None:
        check_ranges(self, BuddyError)
        check_batch_route(self.batch_route)
