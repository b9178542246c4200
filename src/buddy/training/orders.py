"""A router that starts by ranking blocks as was measured for each kind of input.

One removal order for all inputs hides that kinds of input need other blocks. Here the Decision
Module is fitted, before the first step, to the order of each kind's own search, so that the
adapters grow with plans that differ where the inputs do.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.engine.causal_lm import BuddyForCausalLM
from buddy.errors import RecipeError
from buddy.instructions.examples import Example
from buddy.routing.decision import DecisionModule
from buddy.training.model import read_prior
from buddy.training.prompts import LivePrompts
from buddy.training.recipe import OrderSettings
from buddy.training.standardise import draw_summaries

_STEPS: Final = 600
_LEARNING_RATE: Final = 1e-2


def fit_orders(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    orders: Sequence[OrderSettings],
    seed: int,
) -> float:
    """Fit the Decision Module to measured orders; sources that none names keep the prior's.

    Args:
        model: Its router has standardised inputs and pools tokens.
        examples: Training rows.
        orders: Which sources follow which order.
        seed: Of the choice of prompts.

    Returns:
        Share of the scores' variance over these prompts that the fit explains.

    Raises:
        RecipeError: No training row has one of the sources, or a record is none.
    """
    router = model.router
    assert router is not None
    decision, omega = router.decision, router.config.decision.omega
    wanted = {
        name: read_prior(Path(one.record), model.num_blocks)
        for one in orders
        for name in one.sources
    }
    by_source: dict[str, list[Example]] = {}
    for example in examples:
        by_source.setdefault(example.source, []).append(example)
    missing = sorted(wanted.keys() - by_source.keys())
    if missing:
        raise RecipeError(
            f"router.orders: no training row is of source {missing[0]!r}: expected one of "
            f"{', '.join(sorted(by_source))}"
        )
    prompts = LivePrompts(model)
    summaries, targets = [], []
    for source, rows in sorted(by_source.items()):
        drawn = draw_summaries(prompts, rows, seed)
        prior = decision.prior
        offset = omega * (wanted.get(source, prior).to(prior.device) - prior)
        summaries.append(drawn)
        targets.append(offset.expand(len(drawn), -1))
    return _fit(decision, torch.cat(summaries), torch.cat(targets))


@torch.enable_grad()
def _fit(
    decision: DecisionModule,
    summaries: Float[Tensor, "prompts summary"],
    targets: Float[Tensor, "prompts middle"],
) -> float:
    """Least squares; the first layer reads tiny values, so it is learned in its own scale."""
    scale = decision.down.weight.detach().abs().mean(0, keepdim=True)
    change = torch.zeros_like(decision.down.weight, requires_grad=True)
    weight = decision.down.weight.detach().clone()
    bias = decision.down.bias.detach().clone()
    centre = summaries.mean(0)
    up, up_bias = decision.up.weight, decision.up.bias
    optimizer = torch.optim.Adam([change, up, up_bias], lr=_LEARNING_RATE)

    def first_layer() -> tuple[Tensor, Tensor]:
        moved = change * scale
        return weight + moved, bias - moved @ centre

    def error() -> Tensor:
        inner = torch.nn.functional.silu(torch.nn.functional.linear(summaries, *first_layer()))
        made = torch.nn.functional.linear(inner, up, up_bias)
        return (made - targets).square().mean()

    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = error()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        moved_weight, moved_bias = first_layer()
        decision.down.weight.copy_(moved_weight)
        decision.down.bias.copy_(moved_bias)
        spread = (targets - targets.mean(0)).square().mean()
        return float(1 - error_of(decision, summaries, targets) / spread.clamp(min=1e-12))


def error_of(decision: DecisionModule, summaries: Tensor, targets: Tensor) -> Tensor:
    """Mean squared difference of scores without the prior from their targets."""
    made: Tensor = decision(summaries)
    return (made - targets).square().mean()
