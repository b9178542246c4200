"""Evaluation during training: answer cross-entropy and plans at fixed budgets."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.data.examples import Example
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch, collate
from buddy.training.fast import fast_passes
from buddy.training.log import RouteCounts
from buddy.training.losses import answer_losses
from buddy.training.router.choosing import plain_choice
from buddy.training.router.sharding import ShardedBlocks
from buddy.training.router.straight_through import StraightThroughPass, straight_through_pass

_BATCH = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses and plans at one budget.

    Attributes:
        blocks: The budget.
        cross_entropy: Mean over all answer tokens, nats.
        distinct_plans: Over the rows.
        mask_entropy: See `RouteCounts.mask_entropy`.
    """

    blocks: int
    cross_entropy: float
    distinct_plans: int
    mask_entropy: float


def describe(step: int, evaluations: Sequence[Evaluation]) -> str:
    """Two lines about an evaluation after a step, the budgets of both in columns."""
    losses = "  ".join(f"{each.blocks}: {each.cross_entropy:.3f}" for each in evaluations)
    plans = "  ".join(f"{each.blocks}: {each.distinct_plans}" for each in evaluations)
    return (
        f"step {step}  cross-entropy by blocks  {losses}\n"
        f"{'':>{len(str(step)) + 5}}  distinct plans           {plans}"
    )


@torch.no_grad()
def answer_pass(
    model: BuddyForCausalLM,
    batch: Batch,
    depths: Int[Tensor, "batch tokens"],
    sharded: ShardedBlocks | None = None,
) -> tuple[StraightThroughPass, Float[Tensor, " answers"]]:
    """One pass as inference chooses, and what each answer token loses in it, in nats.

    Args:
        model: Whose policy chooses the blocks.
        batch: Prompts and answers.
        depths: Blocks of each token.
        sharded: The blocks, where processes hold shares of them.
    """
    policy = model.scoring_policy
    with fast_passes(model.backbone):
        out = straight_through_pass(
            model.backbone, policy, batch, depths, plain_choice(policy), sharded=sharded
        )
        hidden = out.hidden[batch.rows, batch.columns]
        return out, answer_losses(model.backbone, hidden, batch.targets)


@torch.no_grad()
def evaluate(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    budgets: Sequence[int],
    sharded: ShardedBlocks | None = None,
) -> tuple[list[Evaluation], RouteCounts]:
    """Evaluate at each budget; routes from the prompt alone, as at inference.

    Args:
        model: Put back into the mode it was in.
        examples: Validation rows.
        budgets: In blocks.
        sharded: The blocks, where processes hold shares of them: all of these evaluate the same.

    Returns:
        One evaluation a budget, and all plans, to tell a collapse from.
    """
    was_training = model.training
    model.eval()
    ordered = sorted(examples, key=lambda example: example.num_tokens)
    everything, results = RouteCounts(), []
    for blocks in budgets:
        total, tokens, counts = 0.0, 0, RouteCounts()
        for start in range(0, len(ordered), _BATCH):
            batch = collate(ordered[start : start + _BATCH], model.device)
            depths = torch.full_like(batch.token_ids, blocks)
            out, losses = answer_pass(model, batch, depths, sharded)
            total += float(losses.cpu().double().sum())
            tokens += len(batch.targets)
            counts.add(out.plan.executed_sets)
            everything.add(out.plan.executed_sets)
        results.append(
            Evaluation(
                blocks,
                total / tokens,
                counts.num_distinct,
                counts.mask_entropy(model.num_blocks),
            )
        )
    model.train(was_training)
    return results, everything
