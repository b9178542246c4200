"""The recipe of a ledger: everything that fixes how it is fitted and measured."""

from dataclasses import dataclass, field
from typing import Annotated

from buddy.errors import RecipeError
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import BATCH_SIZE, CheckpointSettings, DataSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSettings(RecipeTable):
    """What is fitted."""

    levels: tuple[int, ...]
    """Blocks that a token may run, rising: a few, from the cheapest to full depth."""
    prompt: int | None = None
    """Blocks of the prompts while losses are measured; full depth if not set."""
    shrinkage: Annotated[float, Range(0, 1e6)] = 20.0
    """Tokens' worth of the mean of all that each token id is drawn towards."""
    least: Annotated[int, Range(1, 10**9)] = 3
    """Times that a token id must have been fed to have a row of its own."""
    batch_size: Annotated[int, BATCH_SIZE] = 8
    """Examples measured at a time."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        levels = self.levels
        if len(levels) < 2 or list(levels) != sorted(set(levels)):
            raise RecipeError(f"ledger.levels must rise, and be two at least, got {list(levels)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRecipe:
    """How a ledger is fitted to a checkpoint; no weight of it changes."""

    model: CheckpointSettings
    """What the ledger is made for."""
    data: DataSettings
    """Rows; those for validation tell what the ledger gains."""
    ledger: LedgerSettings
    """What is fitted."""
    means: tuple[int, ...] = field(default=())
    """Mean blocks at which it is measured on validation rows; the whole range if not set."""

    def __post_init__(self) -> None:
        low, high = self.ledger.levels[0], self.ledger.levels[-1]
        for mean in self.means:
            if not low <= mean <= high:
                raise RecipeError(
                    f"means must lie between the ledger's levels {low} and {high}, got {mean}"
                )
