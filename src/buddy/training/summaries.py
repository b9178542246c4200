"""Summaries less their mean, over their deviation: learned from so, and folded away afterwards.

Pooled values differ between prompts by a few thousandths around a mean that tells nothing. On
them as they are, what a layer adds for every prompt alike is learned a hundred times sooner than
what tells prompts apart. Mean and deviation fit into the first linear layer, so that they cost
nothing at inference and no checkpoint holds them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.data.examples import Example
from buddy.generation.budgets import read_summary
from buddy.model import BuddyForCausalLM
from buddy.routing.router import Router
from buddy.training.batches import collate

PROMPTS: Final = 320
"""Prompts that mean and deviation are taken of, at most."""
_BATCH: Final = 32
_SMALLEST: Final = 1e-4
"""Deviation below which a value counts as constant: it is not blown up."""


@dataclass(frozen=True, slots=True)
class Standard:
    """What summaries are measured against.

    Attributes:
        mean: Over prompts.
        deviation: Over prompts; above zero.
    """

    mean: Float[Tensor, " summary"]
    deviation: Float[Tensor, " summary"]

    @classmethod
    def of(cls, summaries: Float[Tensor, "prompts summary"]) -> "Standard":
        """That of some prompts; a single one deviates from nothing."""
        deviation = summaries.std(0, correction=min(1, len(summaries) - 1))
        return cls(summaries.mean(0), deviation.clamp(min=_SMALLEST))

    def __call__(self, summaries: Float[Tensor, "batch summary"]) -> Float[Tensor, "batch summary"]:
        """Standardised, on the device that they are on."""
        device = summaries.device
        return (summaries - self.mean.to(device)) / self.deviation.to(device)

    @torch.no_grad()
    def fold(self, layer: nn.Linear) -> None:
        """Make a layer for standardised summaries into one that reads them as they are."""
        layer.weight.div_(self.deviation.to(layer.weight.device))
        layer.bias.sub_(layer.weight @ self.mean.to(layer.weight.device))

    @torch.no_grad()
    def unfold(self, layer: nn.Linear) -> None:
        """Make a layer that reads summaries as they are into one for standardised summaries."""
        layer.bias.add_(layer.weight @ self.mean.to(layer.weight.device))
        layer.weight.mul_(self.deviation.to(layer.weight.device))


def router_summaries(
    model: BuddyForCausalLM, router: Router, examples: Sequence[Example]
) -> Float[Tensor, "batch summary"]:
    """What a model's router sees of each prompt."""
    batch = collate(examples, model.device)
    everything = torch.ones_like(batch.is_prompt)
    return read_summary(model.backbone, router, batch.token_ids, everything, batch.is_prompt)


def draw_summaries(
    read: Callable[[Sequence[Example]], Float[Tensor, "batch summary"]],
    examples: Sequence[Example],
    seed: int,
) -> Float[Tensor, "prompts summary"]:
    """Summaries, as `read` gives them, of up to `PROMPTS` prompts that the seed draws."""
    drawn = random.Random(seed).sample(list(examples), min(PROMPTS, len(examples)))
    drawn.sort(key=lambda example: example.num_tokens)
    starts = range(0, len(drawn), _BATCH)
    with torch.no_grad():
        return torch.cat([read(drawn[start : start + _BATCH]) for start in starts])
