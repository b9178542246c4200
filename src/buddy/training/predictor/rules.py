"""Rules that choose budgets without a predictor: constants, prompt length, ridge regression.

A predictor is worth its training where it is ahead of them on prompts that none was fitted to.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example, by_source
from buddy.errors import TrainingError
from buddy.routing.budget_predictor import NUM_PINNED
from buddy.routing.measured_constant import MeasuredConstant
from buddy.training.predictor.grpo import GRPOSettings, rewards
from buddy.training.predictor.loss_table import LossTable
from buddy.training.summaries import Standard

CONSTANT: Final = "constant"
BY_SOURCE: Final = "constant by source"
LENGTH: Final = "prompt length"
RIDGE: Final = "ridge"
PENALTIES: Final = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
"""Penalties of a ridge regression that are tried."""

Rule = Callable[[LossTable], Int[Tensor, " rows"]]
"""Gives each prompt of a table its number of blocks."""


class PairedGain(TypedDict):
    """What choices gain in reward over others for the same prompts; plain values."""

    rows: int
    """Prompts."""
    gain: float
    """Mean."""
    error: float | None
    """Its standard error over prompts; None of a single one."""


class RuleComparison(PairedGain):
    """What a predictor's choices gain over those of a rule."""

    blocks: float
    """Mean of the rule's choices."""
    reward: float
    """Mean reward of the rule's choices."""
    by_source: dict[str, PairedGain]
    """Gains over the prompts of each source."""


def rewards_by_depth(
    table: LossTable, settings: GRPOSettings, lowest: int
) -> Float[Tensor, "rows depths"]:
    """The reward of each row at each depth, from `lowest` blocks to all."""
    num_blocks = table.by_depth.shape[1] + NUM_PINNED
    losses = table.by_depth[:, lowest - NUM_PINNED - 1 :]
    depths = torch.arange(lowest, num_blocks + 1).expand_as(losses)
    return rewards(losses, depths, num_blocks, settings)


class Rules:
    """The rules, fitted to training rows.

    Args:
        table: Training rows at every depth.
        settings: Of the reward.
        lowest: Fewest blocks that may be chosen.

    Attributes:
        choose: Rules by name.
        blocks: The constant for every prompt.
        blocks_by_source: The constant of each source, in alphabetical order.

    Raises:
        TrainingError: A single row, which no regression can be fitted to.
    """

    def __init__(self, table: LossTable, settings: GRPOSettings, lowest: int) -> None:
        if len(table.examples) < 2:
            raise TrainingError(
                "rules beside a predictor are fitted to training rows, and there is 1: expected 2 "
                "or more; add rows to data.train"
            )
        self._settings, self._lowest = settings, lowest
        worth = rewards_by_depth(table, settings, lowest)
        self.blocks = self._best(worth)
        self.blocks_by_source = {
            source: self._best(worth[places])
            for source, places in sorted(places_by_source(table.examples).items())
        }
        self.choose: dict[str, Rule] = {
            CONSTANT: lambda rows: torch.full((len(rows.examples),), self.blocks),
            BY_SOURCE: self._by_source,
            LENGTH: self._regression(table, worth, _lengths),
            RIDGE: self._regression(table, worth, lambda rows: rows.summaries(rows.examples)),
        }

    def compare(self, table: LossTable, *chosen: Int[Tensor, " rows"]) -> dict[str, RuleComparison]:
        """What choices gain over those of each rule, by its name.

        Args:
            table: Held-out rows.
            *chosen: Blocks of each of them, by a predictor or by several, whose mean reward counts.
        """
        worth = rewards_by_depth(table, self._settings, self._lowest)
        ours = torch.stack([self._reward(worth, blocks) for blocks in chosen]).mean(0)
        sources = sorted(places_by_source(table.examples).items())
        found: dict[str, RuleComparison] = {}
        for name, choose in self.choose.items():
            other = choose(table)
            reward = self._reward(worth, other)
            gains = ours - reward
            found[name] = RuleComparison(
                **paired_gain(gains),
                blocks=float(other.double().mean()),
                reward=float(reward.mean()),
                by_source={source: paired_gain(gains[places]) for source, places in sources},
            )
        return found

    def measured(self, found: dict[str, RuleComparison]) -> MeasuredConstant | None:
        """What a checkpoint keeps of a comparison; None of a single prompt."""
        constant = found[CONSTANT]
        error = constant["error"]
        if error is None:
            return None
        return MeasuredConstant(
            blocks=self.blocks,
            by_kind=self.blocks_by_source,
            rows=constant["rows"],
            gain=constant["gain"],
            error=error,
        )

    def _best(self, worth: Float[Tensor, "rows depths"]) -> int:
        """The depth of the highest mean reward; the fewest blocks of equals."""
        return self._lowest + int(worth.mean(0).argmax())

    def _reward(
        self, worth: Float[Tensor, "rows depths"], blocks: Int[Tensor, " rows"]
    ) -> Float[Tensor, " rows"]:
        return worth.gather(1, (blocks - self._lowest)[:, None])[:, 0].double()

    def _by_source(self, table: LossTable) -> Int[Tensor, " rows"]:
        """Each source's constant; the one for every prompt where a source was not trained on."""
        known = self.blocks_by_source
        return torch.tensor([known.get(row.source, self.blocks) for row in table.examples])

    def _regression(
        self,
        table: LossTable,
        worth: Float[Tensor, "rows depths"],
        read: Callable[[LossTable], Float[Tensor, "rows features"]],
    ) -> Rule:
        """The depth whose reward a ridge regression predicts to be highest."""
        inputs = read(table).double()
        standard, mean = Standard.of(inputs), worth.double().mean(0)
        weights = ridge(standard(inputs), worth.double() - mean)
        return lambda rows: (
            self._lowest + (standard(read(rows).double()) @ weights + mean).argmax(1)
        )


def ridge(
    inputs: Float[Tensor, "rows features"], targets: Float[Tensor, "rows outputs"]
) -> Float[Tensor, "features outputs"]:
    """Weights of a ridge regression, at the penalty that predicts rows left out one by one best.

    Args:
        inputs: Mean zero over rows, float64.
        targets: Mean zero over rows, float64.
    """
    left, scale, right = torch.linalg.svd(inputs, full_matrices=False)
    projected = left.T @ targets

    def left_out(penalty: float) -> float:
        """Sum of squared errors of each row, predicted without it."""
        shrunk = scale.square() / (scale.square() + penalty)
        apart = targets - left @ (shrunk[:, None] * projected)
        own = left.square() @ shrunk + 1 / len(targets)  # the mean is fitted, too
        return float((apart / (1 - own).clamp(min=1e-9)[:, None]).square().sum())

    penalty = min(PENALTIES, key=left_out)
    weights: Tensor = right.T @ ((scale / (scale.square() + penalty))[:, None] * projected)
    return weights


def _lengths(table: LossTable) -> Float[Tensor, "rows features"]:
    """The logarithm of each prompt's tokens, and its square."""
    tokens = torch.tensor([[float(len(row.prompt))] for row in table.examples]).log()
    return torch.cat([tokens, tokens.square()], 1)


def places_by_source(examples: Sequence[Example]) -> dict[str, list[int]]:
    """Places of the rows of each source."""
    place = {example: at for at, example in enumerate(examples)}
    return {name: [place[row] for row in rows] for name, rows in by_source(examples).items()}


def paired_gain(gains: Float[Tensor, " rows"]) -> PairedGain:
    """Mean and standard error of what rows gain."""
    rows = len(gains)
    error = float(gains.std(correction=1)) / math.sqrt(rows) if rows > 1 else None
    return PairedGain(rows=rows, gain=float(gains.mean()), error=error)
