"""The cross-entropy of an answer at any number of blocks, its prompt routed alone."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.depth.policy import DepthPolicy
from buddy.training.batches import Batch
from buddy.training.losses import answer_losses, mean_by_row
from buddy.training.predictor.shared_prefix import SharedPass, run_shared


@torch.no_grad()
def depth_losses(
    backbone: Backbone, policy: DepthPolicy, batch: Batch, blocks: Int[Tensor, "batch depths"]
) -> Float[Tensor, "batch depths"]:
    """Mean negative log-likelihood of each row's answer at each of its depths, nats per token.

    Logits are made at the answer's places alone.

    Args:
        backbone: Runs the blocks.
        policy: Chooses them.
        batch: Prompts and answers.
        blocks: How many, first and last included.
    """
    return leaf_losses(backbone, run_shared(backbone, policy, batch, blocks), batch)


def leaf_losses(backbone: Backbone, out: SharedPass, batch: Batch) -> Float[Tensor, "batch plans"]:
    """Mean negative log-likelihood of each row's answer under each of its plans."""
    leaf, losses = leaf_tokens(backbone, out, batch)
    return mean_by_row(losses, leaf, len(out.owner))[out.leaf]


def leaf_tokens(
    backbone: Backbone, out: SharedPass, batch: Batch
) -> tuple[Int[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Negative log-likelihood of the tokens of each leaf's answer, leaf by leaf, and the leaves."""
    leaf, place = (out.owner[:, None] == batch.rows).nonzero(as_tuple=True)
    hidden = out.hidden[leaf, batch.columns[place]]
    return leaf, answer_losses(backbone, hidden, batch.targets[place])
