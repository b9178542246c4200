"""Do rankings of the blocks agree? Ranks, their correlation and spread, over inputs."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.importance.search.orders import ascending_order


def rank_blocks(scores: Float[Tensor, "*inputs blocks"]) -> Int[Tensor, "*inputs blocks"]:
    """Each block's place in its removal order: 0 = least important, goes first."""
    rows = scores.reshape(-1, scores.shape[-1])
    orders = torch.tensor([ascending_order(row) for row in rows.tolist()]).view_as(rows)
    return orders.argsort(-1).view(scores.shape)


def spearman(
    ranks: Int[Tensor, "inputs blocks"], others: Int[Tensor, "others blocks"]
) -> Float[Tensor, "inputs others"]:
    """Spearman's correlation of every ranking with every other: 1 - 6 sum d^2 / (L (L^2 - 1))."""
    blocks = ranks.shape[1]
    squared = (ranks[:, None] - others[None]).double().square().sum(-1)
    return 1 - 6 * squared / (blocks * (blocks**2 - 1))


def over_inputs(ranks: Int[Tensor, "inputs blocks"]) -> dict[str, Any]:
    """How far the rankings of different inputs differ; at least two inputs.

    Returns:
        `spearman_between_inputs`, the mean over pairs; `rank_std`, a block's standard deviation
        over inputs, averaged over blocks; `rank_std_if_random`, what that would be if every
        input's ranking were random.
    """
    blocks = ranks.shape[1]
    return {
        "spearman_between_inputs": float(_off_diagonal(spearman(ranks, ranks)).mean()),
        "rank_std": float(ranks.double().std(0).mean()),
        "rank_std_if_random": math.sqrt((blocks**2 - 1) / 12),
    }


def halves(
    first: Int[Tensor, "inputs blocks"], second: Int[Tensor, "inputs blocks"]
) -> dict[str, Any]:
    """Is an input's ranking its own, or does it differ from others' by noise alone?

    A ranking from some hundred tokens is noisy, so rankings of different inputs differ even if
    importance does not depend on the input. Two halves of one input are as noisy; if they agree
    better than halves of two inputs, importance depends on the input.

    Args:
        first: From the first half of each input.
        second: From the second half.

    Returns:
        Mean Spearman correlation of the halves of the same input and of different inputs; the
        mean over inputs of the difference, and its standard error.
    """
    table = spearman(first, second)
    other = _off_diagonal(table).mean(1)
    own = table.diagonal()
    gain = own - other
    return {
        "spearman_halves_same_input": float(own.mean()),
        "spearman_halves_other_input": float(other.mean()),
        "difference": float(gain.mean()),
        "difference_stderr": float(gain.std() / math.sqrt(len(gain))),
    }


def moved(
    early: Int[Tensor, "inputs blocks"], late: Int[Tensor, "inputs blocks"]
) -> dict[str, Any]:
    """Do blocks change rank from early to late, beyond noise, in the mean over inputs?

    Returns:
        `spearman_same_input`, the mean correlation of an input's two rankings;
        `rank_change`, the mean of its absolute value; `blocks_moved`, those whose mean change is
        more than two standard errors; `blocks_moved_by_chance`, how many are to be expected if
        none moves.
    """
    inputs, blocks = early.shape
    change = (late - early).double()
    mean, stderr = change.mean(0), change.std(0) / math.sqrt(inputs)
    return {
        "spearman_same_input": float(spearman(early, late).diagonal().mean()),
        "rank_change": float(change.abs().mean()),
        "blocks_moved": (mean.abs() > 2 * stderr).nonzero().flatten().tolist(),
        "blocks_moved_by_chance": blocks * _beyond_two_errors(inputs - 1),
    }


def _beyond_two_errors(freedom: int) -> float:
    """The chance that a mean lies more than two of its own standard errors from nought.

    It is Student's, because the error is estimated from the same inputs: twice the tail beyond 2,
    by the midpoint rule over the angle whose tangent is the value over the root of the freedom.
    """
    steps = 10_000
    low = math.atan(2 / math.sqrt(freedom))
    width = (math.pi / 2 - low) / steps
    tail = width * sum(math.cos(low + width * (n + 0.5)) ** (freedom - 1) for n in range(steps))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    return 2 * tail * scale / math.sqrt(math.pi)


def _off_diagonal(table: Float[Tensor, "inputs inputs"]) -> Float[Tensor, "inputs others"]:
    inputs = len(table)
    return table[~torch.eye(inputs, dtype=torch.bool)].view(inputs, inputs - 1)
