"""A ledger from measured losses: a row for each token that was seen, a price for each mean."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray

from buddy.budget.ledger import HASTE
from buddy.routing.ledger import Ledger, LedgerConfig
from buddy.training.ledger.measure import TokenLosses
from buddy.training.ledger.recipe import LedgerSettings

_PRICES = np.array([0.0, *np.geomspace(1e-3, 1.0, 25)])
"""Nats a block that are tried. Under the first, tokens run what the account allows as it comes."""
_SURE = 2.25
"""Standard errors by which a chosen price must be better than the first, on other answers: of 26
prices that are all alike, one passes for 5 means in 100."""
_FOLDS = 10
"""Parts of the answers, each held out once. By two halves what is chosen, and whether anything is,
changed with how answers were halved: on 600 answers a gain of 0.04 nats was missed one time in
two."""


def fit_ledger(answers: Sequence[TokenLosses], settings: LedgerSettings) -> Ledger:
    """A ledger from answers that were measured at every level.

    The price of a mean is the one under which held-out answers lose least: each tenth of them is
    spent by the table that the others make. Where `sure_best` cannot tell its gain from chance, a
    block costs nothing: each token runs what the account allows, or less where the table expects
    no loss from it.

    Args:
        answers: Measured at `settings.levels`.
        settings: Of the recipe.
    """
    ledger = _table(answers, settings)
    ledger.prices.copy_(torch.from_numpy(_prices(answers, settings, ledger.config)))
    return ledger


def _table(answers: Sequence[TokenLosses], settings: LedgerSettings) -> Ledger:
    """A ledger without prices."""
    fed = np.concatenate([answer.token_ids for answer in answers])
    losses = np.concatenate([answer.losses for answer in answers]).astype(np.float64)
    mean = losses.mean(0)
    ids, place, counts = np.unique(fed, return_inverse=True, return_counts=True)
    sums = np.zeros((len(ids), len(mean)))
    np.add.at(sums, place, losses - mean)
    offsets = sums / (counts + settings.shrinkage)[:, None]
    is_kept = counts >= settings.least
    low, high = settings.levels[0], settings.levels[-1]
    config = LedgerConfig(
        levels=settings.levels, means=tuple(range(low, high + 1)), tokens=int(is_kept.sum())
    )
    ledger = Ledger(config)
    ledger.losses.copy_(torch.from_numpy(mean))
    ledger.token_ids.copy_(torch.from_numpy(ids[is_kept]))
    ledger.offsets.copy_(torch.from_numpy(offsets[is_kept]))
    return ledger


def _prices(
    answers: Sequence[TokenLosses], settings: LedgerSettings, config: LedgerConfig
) -> NDArray[np.float64]:
    """The best price at each mean: all prices at all means spend side by side."""
    levels = np.array(config.levels)
    means = np.repeat(np.array(config.means, np.float64), len(_PRICES))
    prices = np.tile(_PRICES, len(config.means))
    lost = np.empty((len(answers), len(means)))
    for is_held_out in _held_out(len(answers)):
        table = _table(
            [answers[place] for place in np.flatnonzero(~is_held_out).tolist()], settings
        )
        for place in np.flatnonzero(is_held_out).tolist():
            lost[place] = _spend(table, answers[place], levels, means, prices)
    best = sure_best(lost.reshape(len(answers), len(config.means), len(_PRICES)))
    chosen: NDArray[np.float64] = _PRICES[best]
    return chosen


def _held_out(count: int) -> Iterator[NDArray[np.bool_]]:
    """Which of so many answers are of a part, part by part."""
    folds = min(_FOLDS, count)
    for fold in range(folds):
        yield np.arange(count) % folds == fold


def sure_best(lost: Float[np.ndarray, "answers means prices"]) -> Int[np.ndarray, " means"]:
    """Place of the price under which answers lose least, by mean; 0 where chance may explain it.

    The best of many prices gains on the answers that it is the best of. So what a choice gains over
    the first price is measured on a part of the answers that it was not made by, each part once.

    Args:
        lost: By each answer, in nats; the first price is nothing.

    Returns:
        Places along the last axis of `lost`.
    """
    gain = np.empty(lost.shape[:2])
    for is_held_out in _held_out(len(lost)):
        best = lost[~is_held_out].sum(0).argmin(1)
        tested_on = lost[is_held_out]
        gain[is_held_out] = tested_on[:, :, 0] - tested_on[:, range(len(best)), best]
    error = gain.std(0, ddof=min(1, len(gain) - 1)) * math.sqrt(len(gain))
    places: NDArray[np.int64] = np.where(gain.sum(0) > _SURE * error, lost.sum(0).argmin(1), 0)
    return places


def _spend(
    table: Ledger,
    answer: TokenLosses,
    levels: NDArray[np.int64],
    means: NDArray[np.float64],
    prices: NDArray[np.float64],
) -> Float[np.ndarray, " ways"]:
    """What one answer loses, each way that it may be spent, as `LedgerBudget.level` spends."""
    account, lost = np.zeros(len(means)), np.zeros(len(means))
    for token_id, losses in zip(answer.token_ids, answer.losses, strict=True):
        expected = np.array(table.expected(token_id))
        block = prices * np.exp(-HASTE * account / means)
        cost = expected + block[:, None] * levels
        cost[levels > np.floor(account + means + 1e-9)[:, None]] = math.inf
        chosen = cost.argmin(1)
        account += means - levels[chosen]
        lost += losses[chosen]
    return lost
