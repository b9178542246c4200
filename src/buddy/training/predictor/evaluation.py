"""What a predictor chooses for held-out prompts, against the best constant and the best of all."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.routing.budget_predictor import NUM_PINNED, BudgetPredictor
from buddy.training.predictor.grpo import GRPOSettings
from buddy.training.predictor.loss_table import LossTable
from buddy.training.predictor.rules import (
    CONSTANT,
    RuleComparison,
    Rules,
    places_by_source,
    rewards_by_depth,
)

_FEW_ROWS: Final = 8
"""Fewer prompts say nothing about a collapse."""


class SourceChoices(TypedDict):
    """Choices for the prompts of one source; plain values, as a training state keeps them."""

    rows: int
    """Prompts."""
    blocks: float
    """Mean of the choices."""
    reward: float
    """Mean."""
    constant_reward: float
    """Mean reward of `PredictorEvaluation.constant_blocks`."""


@dataclass(frozen=True, slots=True)
class PredictorEvaluation:
    """What the likeliest budgets are worth.

    Attributes:
        rows: Prompts.
        blocks: Mean of the choices.
        choices: How often each number of blocks was chosen.
        entropy: Mean of the policy's, in nats.
        cross_entropy: Mean of the answers' at the chosen depths, in nats per token.
        reward: Mean.
        constant_blocks: The one depth for all prompts that has the highest mean reward here.
        constant_reward: That reward: a predictor has learned something where its own is higher.
        best_reward: Mean reward of the best depth of each prompt.
        by_source: Where the prompts come from, in alphabetical order.
        rules: What the choices gain over each rule that was fitted to training rows; empty where
            none was.
    """

    rows: int
    blocks: float
    choices: dict[str, int]
    entropy: float
    cross_entropy: float
    reward: float
    constant_blocks: int
    constant_reward: float
    best_reward: float
    by_source: dict[str, SourceChoices]
    rules: dict[str, RuleComparison] = field(default_factory=dict)

    @property
    def collapsed(self) -> bool:
        """Whether all prompts, and enough of them to tell, have one budget."""
        return self.rows >= _FEW_ROWS and len(self.choices) == 1

    def describe(self) -> str:
        """One line: what is chosen, and what it is worth beside a constant depth."""
        text = (
            f"{self.blocks:.1f} blocks, {len(self.choices)} distinct  reward {self.reward:.3f}  "
            f"best constant {self.constant_reward:.3f} ({self.constant_blocks} blocks)  "
            f"best of each {self.best_reward:.3f}"
        )
        if self.rules:
            constant = self.rules[CONSTANT]
            error = "" if constant["error"] is None else f" ± {constant['error']:.3f}"
            text += f"  above the training rows' constant {constant['gain']:+.3f}{error}"
        return text


@torch.no_grad()
def evaluate_predictor(
    predictor: BudgetPredictor,
    table: LossTable,
    settings: GRPOSettings,
    rules: Rules | None = None,
) -> PredictorEvaluation:
    """Evaluate on all rows of a table.

    Args:
        predictor: Chooses.
        table: Held-out prompts at every depth.
        settings: Of the reward.
        rules: What it is compared with, fitted to other prompts.
    """
    summaries = table.summaries(table.examples).to(predictor.up.weight.device)
    log_pi = predictor(summaries).log_softmax(1).cpu()
    finite = log_pi.masked_fill(log_pi.isinf(), 0.0)
    chosen = predictor.choose(summaries).cpu()
    worth = rewards_by_depth(table, settings, predictor.lowest)
    place = (chosen - predictor.lowest)[:, None]
    reward, constant = worth.gather(1, place)[:, 0], worth.mean(0)
    return PredictorEvaluation(
        rows=len(chosen),
        blocks=float(chosen.double().mean()),
        choices={str(blocks): n for blocks, n in sorted(Counter(chosen.tolist()).items())},
        entropy=float(-(log_pi.exp() * finite).sum(1).mean()),
        cross_entropy=float(table.by_depth.gather(1, chosen[:, None] - NUM_PINNED - 1).mean()),
        reward=float(reward.mean()),
        constant_blocks=predictor.lowest + int(constant.argmax()),
        constant_reward=float(constant.max()),
        best_reward=float(worth.amax(1).mean()),
        by_source=_by_source(table, chosen, reward, worth[:, constant.argmax()]),
        rules={} if rules is None else rules.compare(table, chosen),
    )


def _by_source(
    table: LossTable,
    chosen: Int[Tensor, " rows"],
    reward: Float[Tensor, " rows"],
    constant: Float[Tensor, " rows"],
) -> dict[str, SourceChoices]:
    by_source: dict[str, SourceChoices] = {}
    for source, here in sorted(places_by_source(table.examples).items()):
        by_source[source] = SourceChoices(
            rows=len(here),
            blocks=float(chosen[here].double().mean()),
            reward=float(reward[here].mean()),
            constant_reward=float(constant[here].mean()),
        )
    return by_source
