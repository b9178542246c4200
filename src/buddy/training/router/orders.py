"""A router that starts by ranking blocks as was measured for each kind of input.

One removal order for all inputs hides that kinds of input need other blocks. Here the Decision
Module is set, before the first step, to tell the kinds apart and give each the order of its own
search, so that the adapters grow with plans that differ where the inputs do.

Whether a prompt is of a kind is told by a logistic regression on its summary. Two hidden units make
a ramp of its logit, which is 0 on one side and 1 on the other but for a narrow band between, and
the last layer turns that into the difference of the kind's order from the prior. So a prompt that
is told runs exactly the blocks of its order; a fit by least squares only comes near to it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from buddy.data.examples import Example, by_source
from buddy.errors import RecipeError
from buddy.model import BuddyForCausalLM
from buddy.routing.decision import DecisionModule
from buddy.training.router.model import read_prior
from buddy.training.router.recipe import OrderSettings
from buddy.training.summaries import Standard, draw_summaries, router_summaries

_PENALTY: Final = 1e-3
"""Penalty on squared weights of the regression; without it prompts are learned by heart."""
_ITERATIONS: Final = 300
_BAND: Final = 1.0
"""Width, in logits, of the ramp from no to yes."""
_SHARPNESS: Final = 8.0
"""SiLU units that far from zero are linear or nothing."""


def fit_orders(
    model: BuddyForCausalLM,
    examples: Sequence[Example],
    orders: Sequence[OrderSettings],
    seed: int,
) -> float:
    """Set the Decision Module to measured orders; sources that none names keep the prior's.

    Args:
        model: Its router has standardised inputs, pools tokens, and has two hidden units for each
            order.
        examples: Training rows.
        orders: Which sources follow which order.
        seed: Of the choice of prompts, up to 320 of a source.

    Returns:
        Share of these prompts that are told to be of their kind, and of no other.

    Raises:
        RecipeError: No training row has one of the sources, or a record is none.
    """
    router = model.router
    assert router is not None
    decision = router.decision
    kinds = by_source(examples)
    missing = sorted({name for order in orders for name in order.sources} - kinds.keys())
    if missing:
        raise RecipeError(
            f"router.orders: no training row is of source {missing[0]!r}: expected one of "
            f"{', '.join(sorted(kinds))}"
        )
    read, drawn, sources = partial(router_summaries, model, router), [], []
    for source, rows in sorted(kinds.items()):
        drawn.append(draw_summaries(read, rows, seed))
        sources += [source] * len(drawn[-1])
    summaries = torch.cat(drawn)
    standard = Standard.of(summaries)
    standardised = standard(summaries)
    is_told = torch.ones(len(sources), dtype=torch.bool)
    for place, settings in enumerate(orders):
        is_kind = torch.tensor([source in settings.sources for source in sources])
        teller = _teller(standardised, is_kind.to(summaries.device))
        standard.fold(teller)
        order = read_prior(Path(settings.record), model.resources, "router.orders")
        order = order.to(decision.prior.device)
        _set_ramp(decision, 2 * place, teller, order - decision.prior)
        is_told &= (teller(summaries)[:, 0] > 0).cpu() == is_kind
    return float(is_told.float().mean())


def _teller(
    summaries: Float[Tensor, "prompts summary"], is_kind: Bool[Tensor, " prompts"]
) -> nn.Linear:
    """Logistic regression; the kind and the rest weigh the same."""
    make: Any = nn.utils.skip_init
    layer: nn.Linear = make(nn.Linear, summaries.shape[1], 1, device=summaries.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    wanted = is_kind.float()
    share = wanted.mean().clamp(1 / len(wanted), 1 - 1 / len(wanted))
    weight = torch.where(is_kind, 0.5 / share, 0.5 / (1 - share))
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = layer(summaries)[:, 0]
        error = nn.functional.binary_cross_entropy_with_logits(logits, wanted, weight)
        squares = layer.weight.square().sum() + layer.bias.square().sum()
        total = error + _PENALTY * squares
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    return layer.requires_grad_(False)


@torch.no_grad()
def _set_ramp(
    decision: DecisionModule, unit: int, teller: nn.Linear, change: Float[Tensor, " middle"]
) -> None:
    """Two hidden units that add `omega * change` where the teller says yes."""
    steep = _SHARPNESS / _BAND
    for place, sign in ((unit, 1.0), (unit + 1, -1.0)):
        decision.down.weight[place] = steep * teller.weight[0]
        decision.down.bias[place] = steep * teller.bias[0] + sign * _SHARPNESS / 2
        decision.up.weight[:, place] = sign * decision.config.omega * change / _SHARPNESS
