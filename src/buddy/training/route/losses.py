"""What answers lose under sets of blocks: the one measurement of a routing run."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Example
from buddy.depth.wide import widest_float
from buddy.errors import ModelError
from buddy.training.batches import collate
from buddy.training.predictor.depth_losses import leaf_tokens
from buddy.training.predictor.shared_prefix import run_plans


@dataclass(frozen=True, slots=True)
class Losses:
    """Summed negative log-likelihood of answers, in nats, float64.

    Attributes:
        nats: The sum over each answer, under each set.
        tokens: How many each answer has.
    """

    nats: Float[Tensor, "rows sets"]
    tokens: Float[Tensor, " rows"]

    @classmethod
    def joined(cls, parts: Sequence["Losses"]) -> "Losses":
        """Those of several rows after one another."""
        return cls(torch.cat([p.nats for p in parts]), torch.cat([p.tokens for p in parts]))

    @property
    def mean(self) -> Float[Tensor, " sets"]:
        """Nats a token under each set."""
        return self.nats.sum(0) / self.tokens.sum()

    def behind(self, reference: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Nats a token that each set loses more than a reference, and the paired standard error.

        The error of a single answer is infinite: it tells nothing of others.

        Args:
            reference: Nats of each answer.
        """
        count = len(self.tokens)
        apart = self.nats - reference[:, None]
        mean = apart.sum(0) / self.tokens.sum()
        # Of a ratio of sums: answers are drawn, tokens come with them.
        rest = apart - mean * self.tokens[:, None]
        spread = rest.square().sum(0) * count / (count - 1) if count > 1 else mean + torch.inf
        return mean, spread.sqrt() / self.tokens.sum()

    def is_sure(self, gain: Tensor, error: Tensor, sure: float) -> Bool[Tensor, " sets"]:
        """Whether gains are above so many errors, of which few answers are a poor measure.

        The factor (n + 2) / n for n answers comes near to Student's t at two errors.
        """
        return gain > sure * (1 + 2 / len(self.tokens)) * error


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


def batches(examples: Sequence[Example], size: int) -> Iterator[tuple[list[int], list[Example]]]:
    """Examples of like length side by side, with their places; each once."""
    order = sorted(range(len(examples)), key=lambda place: examples[place].num_tokens)
    for start in range(0, len(order), size):
        places = order[start : start + size]
        yield places, [examples[place] for place in places]


def race_batches(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """The same batches in a mixed order, so that the first ones are of no one length."""
    mixed = [part for _, part in batches(examples, size)]
    random.Random(len(examples)).shuffle(mixed)
    return mixed
