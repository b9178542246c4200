"""The recipe of a router for frozen weights: everything that fixes how it is searched."""

from dataclasses import dataclass, field
from typing import Annotated, Final

from buddy.errors import RecipeError
from buddy.settings import Range, RecipeTable
from buddy.training.recipe import (
    BATCH_SIZE,
    LEARNING_RATE,
    ROWS,
    RUN_SEED,
    SHARE,
    STEPS,
    DataSettings,
    ModelSettings,
)

_PAIRED: Final = Range(2, ROWS.high)
"""Rows that an error is taken of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSettings(RecipeTable):
    """How removal orders are searched, one for all prompts and one for each group."""

    groups: Annotated[int, Range(1, 64)] | None = None
    """Groups of prompts, found among what the router sees of them. By default each source that the
    rows name is a group; rows of one source make `GROUPS` groups."""
    rows: Annotated[int, _PAIRED] = 48
    """Rows of a group that its order is searched on, or more by `answer_tokens`."""
    confirm_rows: Annotated[int, _PAIRED] = 24
    """Other rows of it, on which its order must be better than the common one; more likewise."""
    answer_tokens: Annotated[int, Range(1, 10**9)] = 3000
    """Tokens of answers among `rows`, at least, and their share of it among `confirm_rows`: where
    answers are short a row tells little, and there are more of them if the group has more."""
    check_rows: Annotated[int, _PAIRED] = 24
    """Rows of each source that are searched on by nothing: the figures of the record."""
    least: Annotated[float, SHARE] = 0.6
    """Share of the blocks down to which orders are searched, or the lowest of `depths`; then the
    common order goes on."""
    depths: tuple[float, ...] = (0.87, 0.73, 0.6)
    """Shares of the blocks at which orders are confirmed and checked."""
    candidates: Annotated[int, Range(2, 1024)] = 10
    """Blocks that each round tries: those whose absence cost least before. The first tries all."""
    leave: Annotated[float, Range(0, 100)] = 1.5
    """Standard errors by which a candidate is behind that leaves a round: the rows that are left
    are measured for those that are close."""
    sure: Annotated[float, Range(0, 100)] = 2.0
    """Standard errors by which an order must be ahead of the common one, so that a group has it."""
    batch_size: Annotated[int, BATCH_SIZE] = 4
    """Rows at a time; after each, candidates may leave."""

    def __post_init__(self) -> None:
        RecipeTable.__post_init__(self)
        if not self.depths or list(self.depths) != sorted(set(self.depths), reverse=True):
            raise RecipeError(f"search.depths must be one at least and fall, got {self.depths}")
        if not all(0 < depth < 1 for depth in self.depths):
            raise RecipeError(f"search.depths must be between 0 and 1, got {list(self.depths)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings(RecipeTable):
    """How the Decision Module is fitted to rank as the orders do."""

    rank: Annotated[int, Range(1, 2**16)] = 64
    """Width of its hidden layer."""
    prompts: Annotated[int, ROWS] = 200
    """Prompts of a group, at most; each is seen alone and with parts of its answer."""
    steps: Annotated[int, STEPS] = 1500
    """Steps over all of them."""
    learning_rate: Annotated[float, LEARNING_RATE] = 0.01
    """Step size of AdamW when it begins; it falls to nothing."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.1
    """Decay of AdamW."""
    noise: Annotated[float, Range(0, 100)] = 0.5
    """Deviation of the noise on what is seen, in deviations between prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerFit(RecipeTable):
    """How a ledger is fitted to the routed model."""

    rows: Annotated[int, Range(0, ROWS.high)] = 100
    """Answers of a group that it is fitted on, at most; with 0 there is no ledger."""
    levels: Annotated[int, Range(2, 64)] = 7
    """Depths that a token may run at, spread from the least that is searched to all blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteRecipe(RecipeTable):
    """How a router is made for a model; no weight of the model changes."""

    model: ModelSettings
    """What is routed."""
    data: DataSettings
    """Rows. Without validation rows, some of each source are kept back for the check."""
    search: SearchSettings = field(default_factory=SearchSettings)
    """The orders."""
    fit: FitSettings = field(default_factory=FitSettings)
    """The Decision Module."""
    ledger: LedgerFit = field(default_factory=LedgerFit)
    """What spends a mean over the tokens of an answer."""
    seed: Annotated[int, RUN_SEED] = 0
    """Fixes what is drawn: which rows are of which part, where groups begin, the first weights."""
