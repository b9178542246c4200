"""GRPO for the Budget Predictor: rewards, group advantages, loss. No model is run here."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.routing.budget_predictor import NUM_PINNED
from buddy.settings import Range, RecipeTable


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOSettings(RecipeTable):
    """The paper's settings; `entropy` is ours, as the paper gives none."""

    samples: Annotated[int, Range(2, 1024)] = 4
    """Budgets that are compared for each prompt, drawn from the policy with replacement."""
    lambda_perf: Annotated[float, Range(0, 1e6)] = 5.0
    """Weight of the answer's cross-entropy, in nats per token."""
    lambda_cost: Annotated[float, Range(0, 1e6)] = 0.05
    """Weight of the share of blocks that run."""
    entropy: Annotated[float, Range(0, 1e6)] = 0.01
    """Weight of the policy's entropy, which keeps it from settling too soon."""
    epsilon: Annotated[float, Range(1e-12, 1)] = 1e-6
    """Keeps the advantage finite where all rewards of a group are equal."""


def rewards(
    losses: Float[Tensor, "batch depths"],
    blocks: Int[Tensor, "batch depths"],
    num_blocks: int,
    settings: GRPOSettings,
) -> Float[Tensor, "batch depths"]:
    """`-lambda_perf * CE - lambda_cost * b`.

    Args:
        losses: Cross-entropy of the answer at each depth, in nats per token.
        blocks: The depth, first and last block included.
        num_blocks: Blocks of the model.
        settings: The weights.

    Source: paper (Budget Predictor).
    """
    return -settings.lambda_perf * losses - settings.lambda_cost * blocks / num_blocks


def sample_budgets(
    logits: Float[Tensor, "batch middle"], samples: int, seed: int
) -> Int[Tensor, "batch samples"]:
    """Numbers of blocks drawn from the policy, with replacement; the seed alone fixes them."""
    generator = torch.Generator().manual_seed(seed)
    chances = logits.detach().softmax(1).cpu()
    k = torch.multinomial(chances, samples, replacement=True, generator=generator) + 1
    return (k + NUM_PINNED).to(logits.device)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What is minimised, and the entropy in it.

    Attributes:
        loss: A scalar.
        entropy: Mean over the batch, in nats.
    """

    loss: Float[Tensor, ""]
    entropy: Float[Tensor, ""]


def grpo_loss(
    logits: Float[Tensor, "batch middle"],
    blocks: Int[Tensor, "batch samples"],
    advantages: Float[Tensor, "batch samples"],
    settings: GRPOSettings,
) -> PolicyLoss:
    """`-mean(A log pi(k)) - beta * entropy`: one update a sample, so no ratio and no clipping.

    Args:
        logits: Of the policy, minus infinity where a budget is impossible.
        blocks: What was drawn.
        advantages: What it was worth.
        settings: Weight of the entropy.

    Source: paper (Budget Predictor).
    """
    log_pi = logits.log_softmax(1)
    chosen = log_pi.gather(1, blocks - NUM_PINNED - 1)
    # What is impossible adds nothing: not 0 * -inf, which is NaN.
    finite = log_pi.masked_fill(log_pi.isinf(), 0.0)
    entropy = -(log_pi.exp() * finite).sum(1).mean()
    return PolicyLoss(-(advantages * chosen).mean() - settings.entropy * entropy, entropy)
