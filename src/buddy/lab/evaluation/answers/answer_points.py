"""Figures of answer losses: means by token and by answer, and what another plan costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.samples import mean_and_error

ALL: Final = "all"
"""The task that stands for every source together."""
METRICS: Final = ("nll", "answer_nll")
"""Nats: the mean over all tokens of all answers, and over answers of each one's mean."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer under one plan, as it is logged too.

    Attributes:
        nll: Summed negative log-likelihood.
        tokens: Of the answer.
        blocks: That ran.
        task: Source of the example.
        fed: Tokens that were fed, of prompt and answer.
        executed: Blocks that these ran, all together.
    """

    nll: float
    tokens: int
    blocks: tuple[int, ...]
    task: str
    fed: int = 0
    executed: int = 0


def mean_depth(condition: Condition, answers: Sequence[Answered]) -> float | None:
    """Blocks that a token ran on average; None where the budget or the last token's plan says it.

    A policy that decides while it runs lets each token run blocks of its own, and so does a mean.
    Where the prompt has a budget of its own, its tokens do not count.
    """
    if not condition.is_free:
        return None
    prompt = condition.budget.prefill
    executed = sum(answer.executed for answer in answers)
    fed = sum(answer.fed for answer in answers)
    if prompt is None:
        return executed / max(1, fed)
    rest = sum(answer.tokens - 1 for answer in answers)  # the last one of an answer is not fed
    return (executed - prompt * (fed - rest)) / max(1, rest)


def answer_points(condition: Condition, answers: Sequence[Answered]) -> list[dict[str, Any]]:
    """Both metrics over all answers, and of each source."""
    points = []
    for task, mine in _by_source([(answer, answer) for answer in answers]).items():
        values = [(answer.nll, answer.tokens) for answer, _ in mine]
        depth = mean_depth(condition, [answer for answer, _ in mine])
        points += _both(condition, task, values, **condition.ran(depth))
    return points


def difference_points(
    condition: Condition, pairs: Sequence[tuple[Answered, Answered]], **rest: Any
) -> list[dict[str, Any]]:
    """How much more an answer costs here than in an earlier run, row by row.

    Args:
        condition: Of this run.
        pairs: Each row here, and there.
        **rest: For every figure.
    """
    points = []
    for task, mine in _by_source(pairs).items():
        depth = mean_depth(condition, [own for own, _ in mine])
        points += _both(condition, task, differences(mine), **condition.ran(depth), **rest)
    return points


def differences(pairs: Sequence[tuple[Answered, Answered]]) -> list[tuple[float, int]]:
    """Pairs for `by_token` and `by_answer`: the difference of both losses, and the tokens."""
    return [(own.nll - other.nll, own.tokens) for own, other in pairs]


def exchange_points(
    condition: Condition, pairs: Sequence[tuple[Answered, Answered]], within: str
) -> list[dict[str, Any]]:
    """How much more an answer costs under the plan of another input, pair by pair.

    Args:
        condition: Whose plans they are.
        pairs: Each input under its own plan, and under the other.
        within: Whose plans were exchanged.

    Returns:
        As `answer_points`; `changed` is the share of inputs whose plan became another.
    """
    points = []
    for task, mine in _by_source(pairs).items():
        values = differences([(other, own) for own, other in mine])
        changed = sum(other.blocks != own.blocks for own, other in mine) / len(mine)
        points += _both(condition, task, values, within=within, changed=changed)
    return points


def _by_source(
    pairs: Sequence[tuple[Answered, Answered]],
) -> dict[str, list[tuple[Answered, Answered]]]:
    if not pairs:
        return {}
    by_source = {ALL: list(pairs)}
    for pair in pairs:
        by_source.setdefault(pair[0].task, []).append(pair)
    return by_source


def _both(
    condition: Condition, task: str, values: Sequence[tuple[float, int]], **rest: Any
) -> list[dict[str, Any]]:
    rest |= {"samples": len(values), "tokens": sum(tokens for _, tokens in values)}
    return [
        condition.point(task, metric, value, stderr=error, **rest)
        for metric, (value, error) in zip(
            METRICS, (by_token(values), by_answer(values)), strict=True
        )
    ]


def by_token(values: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """Sum over answers of (value, tokens): the values' sum over the tokens', and its error.

    Answers are drawn, not tokens, so the error is that of a ratio of two means over answers.
    """
    tokens = sum(count for _, count in values)
    ratio = math.fsum(value for value, _ in values) / tokens
    if len(values) < 2:
        return ratio, None
    squares = math.fsum((value - ratio * count) ** 2 for value, count in values)
    return ratio, math.sqrt(squares * len(values) / (len(values) - 1)) / tokens


def by_answer(values: Sequence[tuple[float, int]]) -> tuple[float, float | None]:
    """The mean over answers of each one's value a token, and its error."""
    return mean_and_error([value / count for value, count in values])
