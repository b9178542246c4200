import pytest
import torch
from torch.testing import assert_close

from buddy.errors import RecipeError
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.router.start import start_router
from tests.product.training.examples import random_examples
from tests.tiny import tiny_buddy

EXAMPLES = random_examples(64)


def scores_of(model, examples):
    """As inference scores prompts, one at a time."""
    plans = []
    for example in examples:
        with torch.no_grad():
            summary = RewardModel(model).summaries([example])
        plans.append(model.router.decision.fuse(model.router.decision(summary))[0])
    return torch.stack(plans).detach()


def test_scores_spread_over_prompts_as_far_as_asked_around_the_prior():
    model = tiny_buddy()
    prior = torch.tensor([0.4, -1.0, 0.6, 0.0])
    model.router.decision.prior.copy_(prior)
    start_router(model, EXAMPLES, spread=0.3, seed=5)
    scores = scores_of(model, EXAMPLES)
    # Sums run in another order where prompts stand in batches.
    assert_close(scores.std(0), torch.full((4,), 0.3), atol=1e-3, rtol=1e-3)
    assert_close(scores.mean(0), 0.1 * prior, atol=1e-3, rtol=1e-3)


def test_without_a_spread_every_prompt_scores_as_the_prior():
    model = tiny_buddy()
    model.router.decision.prior.copy_(torch.tensor([0.4, -1.0, 0.6, 0.0]))
    with torch.no_grad():
        model.router.decision.up.weight.zero_()
        model.router.decision.up.bias.zero_()
    before = model.router.decision.down.weight.clone()
    start_router(model, EXAMPLES, spread=0.0, seed=5)
    assert scores_of(model, EXAMPLES).std(0).max() == 0
    assert not torch.equal(before, model.router.decision.down.weight)


def test_the_first_layer_hears_differences_alone():
    model = tiny_buddy()
    start_router(model, EXAMPLES, spread=0.1, seed=5)
    down = model.router.decision.down
    heard = []
    for example in EXAMPLES:
        with torch.no_grad():
            heard.append(down(RewardModel(model).summaries([example]))[0])
    heard = torch.stack(heard)
    assert heard.mean(0).abs().max() < 1e-3
    assert 0.3 < float(heard.std(0).mean()) < 3


@pytest.mark.parametrize("prompts", [1, 8])
def test_scores_are_not_spread_over_prompts_that_are_all_alike(prompts):
    with pytest.raises(RecipeError, match="all training prompts look alike") as refused:
        start_router(tiny_buddy(), EXAMPLES[:1] * prompts, spread=0.1, seed=5)
    assert "\n" not in str(refused.value)
    start_router(model := tiny_buddy(), EXAMPLES[:1] * prompts, spread=0.0, seed=5)
    assert all(bool(p.isfinite().all()) for p in model.router.parameters())


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_a_router_that_pools_scores_is_left_as_it_is(spread):
    model = tiny_buddy(pool="scores")
    before = {name: p.clone() for name, p in model.router.named_parameters()}
    start_router(model, EXAMPLES, spread=spread, seed=5)
    assert all(torch.equal(before[name], p) for name, p in model.router.named_parameters())
