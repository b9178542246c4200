"""How a router starts: its inputs standardised, its scores spread over prompts as far as asked.

Some values differ far more between prompts than others, and all have a mean that tells nothing.
Folding the prompts' mean and deviation into the first layer costs nothing at inference. A spread
above zero makes plans differ between prompts from the first step on, so that the adapters grow with
them; zero starts from the prior alone.
"""

import random
from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.engine.budgets import read_summary
from buddy.engine.causal_lm import BuddyForCausalLM
from buddy.instructions.examples import Example
from buddy.routing.router import Router
from buddy.training.batches import collate

PROMPTS: Final = 320
"""Prompts that mean and deviation are taken of, at most."""
_BATCH: Final = 32


def start_router(
    model: BuddyForCausalLM, examples: Sequence[Example], *, spread: float, seed: int
) -> None:
    """Set the Decision Module's weights before the first step.

    Args:
        model: Has a router that pools tokens; one that pools scores is left as it is.
        examples: Whose prompts are read.
        spread: Standard deviation over prompts of a block's score, as it starts. The prior's is
            omega.
        seed: Of the random directions, and of the choice of prompts.
    """
    router = model.router
    if router is None or router.config.planner.pool == "scores":
        return
    drawn = random.Random(seed).sample(list(examples), min(PROMPTS, len(examples)))
    drawn.sort(key=lambda example: example.num_tokens)
    with torch.no_grad():
        summaries = torch.cat(
            [
                _summaries(model, router, drawn[start : start + _BATCH])
                for start in range(0, len(drawn), _BATCH)
            ]
        )
        _standardise(router, summaries, seed)
        if spread > 0:
            _spread(router, summaries, spread, seed)


def _summaries(
    model: BuddyForCausalLM, router: Router, examples: Sequence[Example]
) -> Float[Tensor, "batch summary"]:
    batch = collate(examples, model.device)
    valid = torch.ones_like(batch.is_prompt)  # pads stand right, where no prompt sees them
    return read_summary(model.backbone, router, batch.token_ids, valid, batch.is_prompt)


def _standardise(router: Router, summaries: Float[Tensor, "prompts summary"], seed: int) -> None:
    down = router.decision.down
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(down.weight.shape, generator=generator).to(down.weight.device)
    deviation = summaries.std(0).clamp(min=1e-4)
    down.weight.copy_(directions / down.in_features**0.5 / deviation)
    down.bias.copy_(-down.weight @ summaries.mean(0))


def _spread(
    router: Router, summaries: Float[Tensor, "prompts summary"], spread: float, seed: int
) -> None:
    up = router.decision.up
    generator = torch.Generator().manual_seed(seed + 1)
    up.weight.copy_(torch.randn(up.weight.shape, generator=generator))
    scores = router.decision(summaries)
    up.weight.mul_(spread / scores.std(0)[:, None])
    up.bias.copy_(-router.decision(summaries).mean(0) + up.bias)
