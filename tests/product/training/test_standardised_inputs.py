"""A router that learns from standardised summaries: it moves as far as one that reads such."""

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import RecipeError
from buddy.routing.decision import DecisionConfig, DecisionModule
from buddy.training.router.orders import fit_orders
from buddy.training.router.recipe import OrderSettings, RouterSettings
from buddy.training.router.standardised import StandardisedInputs
from buddy.training.router.start import start_router
from buddy.training.summaries import Standard
from tests.product.training.test_orders import FIRST, PRIOR, SECOND, ranks, record, started

__all__ = ["record"]  # a fixture

WIDTH, MIDDLE, RATE, STEPS = 6, 4, 1e-3, 20
DRAW = torch.Generator().manual_seed(0)
STANDARDISED = torch.randn(64, WIDTH, generator=DRAW)
# What pooled values look like: means of all sizes, and small deviations of different sizes.
SUMMARIES = 0.3 + 0.002 * (1 + torch.arange(WIDTH)) * STANDARDISED
WANTED = torch.randn(64, MIDDLE, generator=DRAW)


def decision():
    torch.manual_seed(1)
    made = DecisionModule(WIDTH, MIDDLE, DecisionConfig(rank=8))
    torch.nn.init.normal_(made.up.weight)
    return made


def learned(module, summaries):
    """The scores before and after some steps of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0)
    before = module(summaries).detach()
    for _ in range(STEPS):
        (module(summaries) - WANTED).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, module(summaries).detach()


def test_scores_move_as_those_of_a_router_that_reads_standardised_summaries():
    standard = Standard.of(SUMMARIES)
    before, after = learned(decision(), standard(SUMMARIES))
    module = decision()
    standard.fold(module.down)
    inputs = StandardisedInputs(module, standard)
    begun, moved = learned(module, SUMMARIES)
    # atol: the mean costs digits of the small differences.
    assert_close(begun, before, atol=1e-4, rtol=0)
    assert_close(moved, after, atol=1e-4, rtol=0)
    with inputs.folded():
        assert_close(module(SUMMARIES), after, atol=1e-3, rtol=0)
    # Folded before the first step instead, the first layer hardly moves what it hears.
    late = decision()
    standard.fold(late.down)
    late.up.requires_grad_(False)
    heard = [late.down(SUMMARIES).detach()]
    learned(late, SUMMARIES)
    heard.append(late.down(SUMMARIES).detach())
    module = decision()
    standard.fold(module.down)
    StandardisedInputs(module, standard)
    module.up.requires_grad_(False)
    hears = [module.down(standard(SUMMARIES)).detach()]
    learned(module, SUMMARIES)
    hears.append(module.down(standard(SUMMARIES)).detach())
    apart = [(after - before - (after - before).mean(0)).std() for before, after in (heard, hears)]
    assert apart[0] < 0.1 * apart[1]


def test_folding_lasts_as_long_as_the_context_and_gives_back_the_same_bits():
    module, standard = decision(), Standard.of(SUMMARIES)
    inputs = StandardisedInputs(module, standard)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    scores = module(SUMMARIES)
    with inputs.folded():
        assert not torch.equal(module.down.weight, before["down.weight"])
        heard = torch.nn.functional.silu(module.down(SUMMARIES))  # as a token table reads it
        assert_close(module.up(heard), scores, atol=1e-3, rtol=0)
    with pytest.raises(RuntimeError, match="shapes"), inputs.folded():
        module(SUMMARIES[:, 1:])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(module(SUMMARIES), scores)


def test_orders_are_told_apart_as_before(record):
    model = started()
    orders = (OrderSettings(sources=("first",), record=str(record)),)
    rows = [*FIRST, *SECOND]
    standard = start_router(model, rows, spread=0.0, seed=5)
    fit_orders(model, rows, orders, seed=5)
    inputs = StandardisedInputs(model.router.decision, standard)
    assert ranks(model, FIRST) == {(4, 1, 3, 2)}
    with inputs.folded():
        assert ranks(model, FIRST) == {(4, 1, 3, 2)}
        assert ranks(model, SECOND) == {tuple((PRIOR.argsort() + 1).tolist())}


def test_only_a_router_that_pools_tokens_learns_so():
    planner = RouterSettings().planner.__class__(pool="scores")
    for settings, says in (
        ({"policy": "random"}, "policy 'random' has none"),
        ({"planner": planner}, 'planner.pool is "scores"'),
    ):
        with pytest.raises(RecipeError, match=f"standardise.*{says}") as refused:
            RouterSettings(standardise=True, **settings)
        assert "\n" not in str(refused.value)
