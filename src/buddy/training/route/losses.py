"""What answers lose under sets of blocks: the one measurement of a routing run."""

import random
from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example
from buddy.depth.wide import widest_float
from buddy.errors import ModelError
from buddy.training.answer_losses import Losses
from buddy.training.batches import by_length, collate
from buddy.training.predictor.depth_losses import leaf_tokens
from buddy.training.predictor.shared_prefix import run_plans


@torch.no_grad()
def set_losses(
    backbone: Backbone, examples: Sequence[Example], sets: Bool[Tensor, "#rows sets blocks"]
) -> Losses:
    """What some answers lose, side by side; within `training.fast.fast_passes` it is faster.

    Args:
        backbone: Runs the blocks; sets that begin alike share their beginning.
        examples: Prompts and answers.
        sets: True = run, for each row or for all; the first block runs in each.

    Raises:
        ModelError: A loss is not a number.
    """
    batch = collate(examples, backbone.device)
    every = sets.to(backbone.device).expand(len(examples), -1, -1)
    out = run_plans(backbone, 1, batch, lambda seen: every)
    leaf, losses = leaf_tokens(backbone, out, batch)
    nats = torch.zeros(len(out.owner), dtype=widest_float(losses.device), device=losses.device)
    nats.index_add_(0, leaf, losses.to(nats.dtype))
    if not bool(nats.isfinite().all()):
        raise ModelError(
            "the loss of an answer is not a number: the model's weights are damaged or its number "
            "format overflows; load it in bfloat16 or float32"
        )
    return Losses(nats[out.leaf].cpu().double(), batch.answer_tokens.cpu().double())


def race_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """The same batches in a mixed order, so that the first ones are of no one length."""
    mixed = [part for _, part in by_length(examples, size)]
    random.Random(len(examples)).shuffle(mixed)
    return mixed
