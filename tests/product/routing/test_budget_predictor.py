import pytest
import torch
from torch.testing import assert_close

from buddy.errors import PolicyError
from buddy.routing.budget_predictor import BudgetPredictor, BudgetPredictorConfig
from buddy.routing.planner import PlannerConfig
from buddy.routing.router import RouterConfig
from tests.tiny import random_predictor, random_router, tiny_model


def router_config(num_blocks=6, **planner):
    return RouterConfig(num_blocks=num_blocks, token_width=4, planner=PlannerConfig(**planner))


def test_by_hand():
    predictor = BudgetPredictor(router_config(5), BudgetPredictorConfig(rank=1))
    with torch.no_grad():
        predictor.down.weight.fill_(1.0)
        predictor.down.bias.fill_(0.0)
        predictor.up.weight.copy_(torch.tensor([[1.0], [3.0], [2.0]]))
    # silu(2) = 2 / (1 + e^-2) = 1.761594
    summary = torch.tensor([[0.5, 1.5, -1.0, 1.0], [0.0, 0.0, 0.0, -1.0]])
    expected = torch.tensor([[1.761594, 5.284782, 3.523188], [-0.268941, -0.806823, -0.537882]])
    assert_close(predictor(summary), expected)
    # k = 2 and k = 1, each plus the first and the last block
    assert predictor.choose(summary).tolist() == [4, 3]


def test_an_untrained_predictor_holds_every_budget_for_alike_and_ties_go_to_the_fewer():
    predictor = BudgetPredictor(router_config())
    summary = torch.randn(3, 4)
    assert_close(predictor(summary).softmax(1), torch.full((3, 4), 0.25))
    assert predictor.choose(summary).tolist() == [3, 3, 3]


@pytest.mark.parametrize(("layer", "lowest"), [(1, 3), (2, 3), (3, 4), (4, 5)])
def test_what_pinned_blocks_exceed_is_never_chosen(layer, lowest):
    config = router_config(context_layer=layer)
    predictor = BudgetPredictor(config)
    with torch.no_grad():
        predictor.up.bias.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    logits = predictor(torch.randn(2, 4))
    assert predictor.choose(torch.randn(2, 4)).tolist() == [lowest] * 2
    assert logits.isinf().sum(1).tolist() == [lowest - 3] * 2
    if layer == 1:
        assert len(set(random_predictor_choices(config))) > 1


def random_predictor_choices(config):
    router = type("Stub", (), {"config": config})
    return random_predictor(router).choose(torch.randn(32, 4)).tolist()


def test_a_model_without_a_choice_is_refused():
    with pytest.raises(PolicyError, match="no budget to predict"):
        BudgetPredictor(router_config(4, context_layer=4))
    with pytest.raises(PolicyError, match="rank"):
        BudgetPredictorConfig(rank=0)


def test_nan_is_an_error():
    predictor = BudgetPredictor(router_config())
    with pytest.raises(PolicyError, match="NaN"):
        predictor.choose(torch.full((1, 4), torch.nan))


def test_it_stays_in_float32_to_the_last_bit():
    router = random_router(tiny_model())
    predictor = random_predictor(router)
    before = {name: p.clone() for name, p in predictor.named_parameters()}
    summary = torch.randn(2, router.config.summary_width)
    plain = predictor(summary)
    torch.nn.Sequential(predictor).to(torch.bfloat16)
    for name, parameter in predictor.named_parameters():
        assert torch.equal(parameter, before[name])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(predictor(summary), plain)


@pytest.mark.parametrize(
    ("planner", "width"), [({}, 4), ({"summary": "mean+last"}, 8), ({"pool": "scores"}, 5)]
)
def test_it_is_as_wide_as_the_routers_summary(planner, width):
    assert BudgetPredictor(router_config(7, **planner)).down.in_features == width
