"""A router that learns from measured plans: two blocks' scores differ by what their swap costs.

Beside the router's own plan, neighbours of it are run, without gradients: in each, a block that ran
and one that did not change places. So a score comes to be what a block is worth, in nats a token,
beside the blocks of such plans; a gate's derivative tells of an infinitesimal part of a block.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.depth.plan import DepthPlan
from buddy.depth.policy import DepthPolicy, Observation
from buddy.depth.select import select_blocks
from buddy.model import BuddyForCausalLM
from buddy.training.batches import Batch
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans
from buddy.training.router.choosing import free_blocks
from buddy.training.router.recipe import RouterSettings
from buddy.training.router.relaxation import gumbel_noise

Swaps = tuple[Int[Tensor, "batch swaps"], Int[Tensor, "batch swaps"]]
"""The block that each swap takes out of a plan, and the one that it puts in."""


def measured_loss(
    model: BuddyForCausalLM,
    batch: Batch,
    budgets: Int[Tensor, " batch"],
    row_weights: Float[Tensor, " batch"],
    settings: RouterSettings,
    *,
    places: Sequence[int],
    seed: int,
) -> Float[Tensor, ""]:
    """The squared error, in nats a token, of differences of scores as predictions of swaps' costs.

    Args:
        model: With a router, which alone gets a gradient; dropout rests.
        batch: Prompts and answers.
        budgets: Of each row, in blocks.
        row_weights: Of each row's mean error.
        settings: How many plans are measured, and how far from the boundary blocks are drawn.
        places: Of the rows in the whole batch, over all processes.
        seed: Of the step.
    """
    policy, backbone = model.scoring_policy, model.backbone
    predicted = list[Tensor]()

    def plans(seen: Observation) -> Tensor:
        with torch.enable_grad():
            scores = policy.scores(policy.observe(None, seen), budgets)
        plan = select_blocks(scores.detach(), budgets, pinned=policy.pinned)
        swaps = draw_swaps(scores.detach(), plan, policy, settings, places=places, seed=seed)
        with torch.enable_grad():
            predicted.append(scores.gather(1, swaps[0]) - scores.gather(1, swaps[1]))
        return with_swaps(plan, swaps)

    was_training = model.training
    model.eval()
    try:
        out = run_plans(backbone, policy.context_layer, batch, plans)
        losses = leaf_losses(backbone, out, batch)
    finally:
        model.train(was_training)
    costs = losses[:, 1:] - losses[:, :1]
    return (row_weights[:, None] * (predicted[0] - costs).square()).sum() / costs.shape[1]


def draw_swaps(
    scores: Float[Tensor, "batch blocks"],
    plan: DepthPlan,
    policy: DepthPolicy,
    settings: RouterSettings,
    *,
    places: Sequence[int],
    seed: int,
) -> Swaps:
    """Swaps of each row's plan, one fewer than plans are measured; drawn with replacement.

    Those of blocks whose scores are near the boundary are likelier: `exp` of the distance over
    `temperature`. A row that runs all blocks, or none that may be skipped, swaps a block for
    itself.

    Args:
        scores: By which the plan was chosen.
        plan: Of each row.
        policy: Whose blocks that always run are left alone.
        settings: `samples` and `temperature`.
        places: Of the rows in the whole batch, over all processes.
        seed: Of the step.
    """
    free, swaps = free_blocks(policy), settings.samples - 1
    noise = gumbel_noise(places, 2 * swaps * len(free), seed=seed).to(scores.device)
    leaves, enters = noise.view(len(places), 2, swaps, len(free)).unbind(1)
    near = scores[:, None, free] / settings.temperature
    is_kept = plan.mask[:, None, free]
    first = free[0]
    out = first + (leaves - near).masked_fill(~is_kept, -torch.inf).argmax(2)
    into = first + (enters + near).masked_fill(is_kept, -torch.inf).argmax(2)
    has_both = is_kept.any(2) & ~is_kept.all(2)
    return torch.where(has_both, out, first), torch.where(has_both, into, first)


def with_swaps(plan: DepthPlan, swaps: Swaps) -> Tensor:
    """Each row's plan and its neighbours, [batch, 1 + swaps, blocks]; True = run."""
    out, into = swaps
    masks = plan.mask[:, None].repeat(1, 1 + out.shape[1], 1)
    neighbours = masks[:, 1:]
    was = neighbours.gather(2, out[..., None])
    neighbours.scatter_(2, out[..., None], False)
    neighbours.scatter_(2, into[..., None], was)
    return masks
