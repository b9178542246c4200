"""A mean number of blocks, spent on the tokens of an answer for which depth pays.

Each token deposits the mean into an account and withdraws what it runs. What depth is worth to a
token, a ledger knows: `buddy.routing.ledger` has the trained one.

Source: ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Protocol, runtime_checkable

from buddy.budget.source import Progress
from buddy.errors import BudgetError

HASTE: Final = 2.0
"""How much cheaper a block gets for each mean that the account holds, so that it is used up.

An answer ends before its account is empty. The faster the price falls, the less is left, and the
less has been saved for tokens that gain more by it: under 2 short answers run their mean to 0.1 or
0.15 block and lose no more than under 0.5; under 4 the gain goes (`benchmarks/account.py`)."""


@runtime_checkable
class DepthPrices(Protocol):
    """What depth is worth to each token, and what it costs."""

    @property
    def levels(self) -> Sequence[int]:
        """Blocks that a token may run, rising."""
        ...

    def expected(self, token_id: int) -> list[float]:
        """What a token is expected to lose at each level, in nats."""
        ...

    def price(self, mean: float) -> float:
        """What a block costs where the account is empty, in nats."""
        ...


def check_mean(mean: Fraction, means: tuple[int, int] | None) -> None:
    """Refuse a mean that a ledger cannot spend.

    Args:
        mean: In blocks.
        means: The smallest and the largest that it can; None where there is no ledger.

    Raises:
        BudgetError: The mean lies outside, or there is no ledger.
    """
    if means is None:
        raise BudgetError(
            f"a mean of {float(mean):g} blocks a token needs a ledger, which spends it over the "
            "tokens of an answer, and this model has none: name a budget for each token, such as "
            "0.7, or fit a ledger with buddy train-ledger"
        )
    if not means[0] <= mean <= means[1]:
        raise BudgetError(
            f"a mean of {float(mean):g} blocks a token is outside what this model's ledger spends: "
            f"expected {means[0]} to {means[1]} blocks"
        )


@dataclass(frozen=True, slots=True, eq=False)
class LedgerBudget:
    """A budget source: a ledger, and the mean that it spends.

    The prompt's tokens run the mean, rounded down.
    """

    ledger: DepthPrices
    mean: Fraction

    reads_tokens = True

    def ask(self, progress: Progress) -> int | Sequence[int]:
        """Blocks by the tokens that are fed and by what the answer has run."""
        if progress.is_prompt:
            return math.floor(self.mean)
        tokens, executed = progress.answer_tokens, progress.answer_executed
        budgets: list[int] = []
        for token_id in progress.token_ids:
            budgets.append(self.level(token_id, tokens, executed))
            tokens, executed = tokens + 1, executed + budgets[-1]
        return budgets

    def level(self, token_id: int, tokens: int, executed: int) -> int:
        """Blocks of the next token, after so many of an answer that have run so many blocks.

        An answer that ran more than the mean under another budget runs the least level until that
        is made up for.
        """
        account = self.mean * tokens - executed
        most = math.floor(account + self.mean)
        levels = self.ledger.levels
        if most < levels[0]:
            return levels[0]
        price = self.ledger.price(float(self.mean))
        price *= math.exp(-HASTE * float(account / self.mean))
        allowed = zip(self.ledger.expected(token_id), levels, strict=True)
        return min((loss + price * level, level) for loss, level in allowed if level <= most)[1]

    def levels(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks of each token of an answer."""
        progress = Progress(
            is_prompt=False, new_tokens=len(token_ids), num_blocks=0, token_ids=tuple(token_ids)
        )
        return list(self.ask(progress))  # type: ignore[arg-type]  # a list, of an answer
