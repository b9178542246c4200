"""The ledger: a mean number of blocks a token, spent on the tokens for which depth pays.

Each token of an answer deposits the mean into an account and withdraws what it runs. The account is
never negative, so after every token the answer has run at most the mean times its tokens. A table
by token id says what each depth is worth to the token that is fed. So a token's depth is known
before its pass begins, and depends on the tokens and on what ran, on nothing else.

Source: ours.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from buddy.budget.read import check_mean
from buddy.budget.source import Progress
from buddy.errors import PolicyError
from buddy.routing.float32 import Float32Module
from buddy.routing.tensor_version import mark_of
from buddy.settings import Range, check_ranges

HASTE: Final = 0.5
"""How much cheaper a block gets for each mean that the account holds, so that it is used up."""


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

    def budget(self, mean: Fraction) -> "LedgerBudget":
        """A mean number of blocks, to be spent on the tokens of an answer.

        Raises:
            BudgetError: It lies outside the ledger's levels.
        """
        check_mean(mean, self.range)
        return LedgerBudget(self, mean)

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest mean that it can spend, in blocks."""
        return self.config.levels[0], self.config.levels[-1]


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


@dataclass(frozen=True, slots=True, eq=False)
class LedgerBudget:
    """A budget source: a ledger, and the mean that it spends.

    The prompt's tokens run the mean, rounded down.
    """

    ledger: Ledger
    mean: Fraction

    reads_tokens = True

    @property
    def prompt(self) -> int:
        """Blocks of the prompt's tokens."""
        return math.floor(self.mean)

    def ask(self, progress: Progress) -> int | Sequence[int]:
        """By the tokens that are fed and what the answer has run."""
        if progress.is_prompt:
            return self.prompt
        tokens, executed = progress.answer_tokens, progress.answer_executed
        said = []
        for token_id in progress.token_ids:
            said.append(self.level(token_id, tokens, executed))
            tokens, executed = tokens + 1, executed + said[-1]
        return said

    def level(self, token_id: int, tokens: int, executed: int) -> int:
        """Blocks of the next token, after so many of an answer that have run so many blocks.

        An answer that ran more than the mean under another budget runs the least level until that
        is made up for.
        """
        held = self.mean * tokens - executed
        most = math.floor(held + self.mean)
        if most < self.ledger.config.levels[0]:
            return self.ledger.config.levels[0]
        block = self.ledger.price(float(self.mean)) * math.exp(-HASTE * float(held / self.mean))
        levels = self.ledger.config.levels
        allowed = zip(self.ledger.expected(token_id), levels, strict=True)
        return min((loss + block * level, level) for loss, level in allowed if level <= most)[1]

    def levels(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of each token of an answer."""
        progress = Progress(
            is_prompt=False, new_tokens=len(token_ids), num_blocks=0, token_ids=tuple(token_ids)
        )
        return list(self.ask(progress))  # type: ignore[arg-type]  # a list, of an answer
