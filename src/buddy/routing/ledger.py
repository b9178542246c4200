"""The ledger: a mean number of blocks a token, spent on the tokens for which depth pays.

Each token of an answer deposits the mean into an account and withdraws what it runs. The account is
never negative, so after every token the answer has run at most the mean times its tokens. A table
by token id says what each depth is worth to the token that is fed. So a token's depth is known
before its pass begins, and depends on the tokens and on what ran, on nothing else.

Source: ours.
"""

from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from buddy.budget.ledger import LedgerBudget, check_mean
from buddy.errors import PolicyError
from buddy.routing.float32 import Float32Module
from buddy.routing.tensor_version import mark_of
from buddy.settings import Range, check_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerConfig:
    """What gives a ledger its shapes; JSON in a checkpoint."""

    levels: tuple[int, ...]
    """Blocks that a token may run, rising."""
    means: tuple[int, ...]
    """Mean blocks that a price is known for, rising."""
    tokens: Annotated[int, Range(0, 10**7)]
    """Token ids that have a row of their own."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)
        for name in ("levels", "means"):
            values = getattr(self, name)
            if len(values) < 2 or values[0] < 1 or list(values) != sorted(set(values)):
                raise PolicyError(
                    f"ledger.{name} must be at least two numbers of blocks, rising, got {values}"
                )
        if not self.levels[0] <= self.means[0] <= self.means[-1] <= self.levels[-1]:
            raise PolicyError(
                f"ledger.means must lie between the levels {self.levels[0]} and "
                f"{self.levels[-1]}, got {self.means}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


class Ledger(Float32Module):
    """What each depth is expected to lose, by the token that is fed, and what a block costs.

    Args:
        config: Its shapes.

    Attributes:
        losses: [levels], nats a token.
        token_ids: [tokens], rising; in float32, as all tensors of a checkpoint, which holds them
            exactly.
        offsets: [tokens, levels], of these tokens from `losses`.
        prices: [means], nats a block.
    """

    losses: Float[Tensor, " levels"]
    token_ids: Float[Tensor, " tokens"]
    offsets: Float[Tensor, "tokens levels"]
    prices: Float[Tensor, " means"]

    def __init__(self, config: LedgerConfig) -> None:
        super().__init__()
        self.config = config
        levels = len(config.levels)
        self.register_buffer("losses", torch.zeros(levels))
        self.register_buffer("token_ids", torch.zeros(config.tokens))
        self.register_buffer("offsets", torch.zeros(config.tokens, levels))
        self.register_buffer("prices", torch.zeros(len(config.means)))
        self._listed: _Listed | None = None

    def expected(self, token_id: int) -> list[float]:
        """What a token is expected to lose at each level, in nats."""
        listed = self._list()
        return listed.rows.get(token_id, listed.other)

    def price(self, mean: float) -> float:
        """What a block costs where the account is empty, in nats."""
        prices = self._list().prices
        if mean not in prices:
            prices[mean] = float(np.interp(mean, self.config.means, self.prices.tolist()))
        return prices[mean]

    def _list(self) -> "_Listed":
        """The tensors as lists, made again when one has changed."""
        mark = mark_of((self.losses, self.token_ids, self.offsets, self.prices))
        listed = self._listed
        if listed is None or listed.mark != mark:
            rows = (self.losses + self.offsets).tolist()
            by_token = dict(zip(self.token_ids.tolist(), rows, strict=True))
            # One value: another thread sees all of it, or none.
            listed = self._listed = _Listed(mark, self.losses.tolist(), by_token)
        return listed

    def budget(self, mean: Fraction) -> LedgerBudget:
        """A mean number of blocks, to be spent on the tokens of an answer.

        Raises:
            BudgetError: It lies outside the ledger's levels.
        """
        check_mean(mean, self.range)
        return LedgerBudget(self, mean)

    @property
    def levels(self) -> tuple[int, ...]:
        """Blocks that a token may run, rising."""
        return self.config.levels

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest mean that it can spend, in blocks."""
        return self.levels[0], self.levels[-1]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A ledger's numbers where plain code reads them fastest.

    Attributes:
        mark: Of the tensors that they are of.
        other: What a token without a row of its own loses at each level.
        rows: The same of the others, by token id.
        prices: Of the means that were asked for.
    """

    mark: tuple[int, ...]
    other: list[float]
    rows: dict[float, list[float]]
    prices: dict[float, float] = field(default_factory=dict)
