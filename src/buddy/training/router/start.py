"""How a router starts: its inputs standardised, its scores spread over prompts as far as asked.

Some values differ far more between prompts than others, and all have a mean that tells nothing.
Folding the prompts' mean and deviation into the first layer costs nothing at inference. A spread
above zero makes plans differ between prompts from the first step on, so that the adapters grow with
them; zero starts from the prior alone.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.routing.router import Router
from buddy.training.summaries import Standard, draw_summaries, router_summaries

_SMALLEST: Final = 1e-4
"""Deviation of scores below which it is rounding alone; prompts that differ make it near to 1."""


def start_router(
    model: BuddyForCausalLM, examples: Sequence[Example], *, spread: float, seed: int
) -> Standard | None:
    """Set the Decision Module's weights before the first step.

    Args:
        model: Has a router that pools tokens; one that pools scores is left as it is.
        examples: Whose prompts are read.
        spread: Standard deviation over prompts of a block's score, as it starts. The prior's is
            omega.
        seed: Of the random directions, and of the choice of prompts.

    Returns:
        What summaries are measured against, folded into the first layer; None where there is none.

    Raises:
        RecipeError: Scores are to be spread over prompts that are all alike.
    """
    router = model.router
    if router is None or router.config.planner.pool == "scores":
        return None
    summaries = draw_summaries(partial(router_summaries, model, router), examples, seed)
    standard = Standard.of(summaries)
    with torch.no_grad():
        _standardise(router, standard, seed)
        if spread > 0:
            _spread(router, summaries, spread, seed)
    return standard


def _standardise(router: Router, standard: Standard, seed: int) -> None:
    down = router.decision.down
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(down.weight.shape, generator=generator).to(down.weight.device)
    down.weight.copy_(directions / down.in_features**0.5)
    down.bias.zero_()
    standard.fold(down)


def _spread(
    router: Router, summaries: Float[Tensor, "prompts summary"], spread: float, seed: int
) -> None:
    up = router.decision.up
    generator = torch.Generator().manual_seed(seed + 1)
    up.weight.copy_(torch.randn(up.weight.shape, generator=generator))
    scores = router.decision(summaries)
    deviation = scores.std(0, correction=min(1, len(scores) - 1))
    if float(deviation.min()) < _SMALLEST:
        raise RecipeError(
            "router.spread: all training prompts look alike to the router, so no scores can be "
            "spread over them: add other rows, or set router.spread to 0"
        )
    up.weight.mul_(spread / deviation[:, None])
    up.bias.copy_(-router.decision(summaries).mean(0) + up.bias)
