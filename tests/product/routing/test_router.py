import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from buddy.depth.policy import Observation
from buddy.depth.select import select_blocks
from buddy.errors import PolicyError
from buddy.routing.decision import DecisionConfig, DecisionModule
from buddy.routing.planner import ContextState, PlannerConfig
from buddy.routing.router import Router, RouterConfig
from buddy.routing.token_table import TokenTable
from buddy.settings import build

TOKENS = torch.tensor([[[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]]])
ALL = torch.ones(1, 3, dtype=torch.bool)


def state_after(tokens, router_sees, decay=1.0):
    return ContextState.empty(tokens).add(tokens, router_sees, decay)


def test_mean_by_hand_and_pads_do_not_count():
    assert state_after(TOKENS, ALL).pooled().tolist() == [[3.0, pytest.approx(4 / 3)]]
    without_middle = torch.tensor([[True, False, True]])
    assert state_after(TOKENS, without_middle).pooled().tolist() == [[3.0, 4.0]]


def test_ema_by_hand():
    # weights 0.25, 0.5, 1 over a sum of 1.75
    pooled = state_after(TOKENS, ALL, decay=0.5).pooled()
    expected = torch.tensor([[(0.25 + 1.5 + 5) / 1.75, (0.5 - 2 + 6) / 1.75]])
    assert_close(pooled, expected)


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_token_by_token_equals_all_at_once(decay):
    torch.manual_seed(0)
    tokens, router_sees = torch.randn(3, 9, 4), torch.rand(3, 9) > 0.3
    whole = state_after(tokens, router_sees, decay)
    state = ContextState.empty(tokens)
    for t in range(9):
        state = state.add(tokens[:, t : t + 1], router_sees[:, t : t + 1], decay)
    assert_close(state.total, whole.total)
    assert_close(state.weight, whole.weight)
    assert_close(state.last, whole.last)


@pytest.mark.parametrize("decay", [1.0, 0.98, 0.7])
@pytest.mark.parametrize("steps", [[400], [399, 1], [1] * 400, [7, 130, 1, 262]])
def test_the_table_weighs_a_long_text_as_the_cache_does(decay, steps):
    generator = torch.Generator().manual_seed(0)
    planner = PlannerConfig() if decay == 1 else PlannerConfig(summary="ema", ema_decay=decay)
    router = Router(RouterConfig(num_blocks=6, token_width=8, planner=planner))
    values = torch.randint(-9, 10, (50, 8), generator=generator).float()
    with torch.no_grad():
        for weight in (router.decision.down.weight, router.decision.up.weight):
            # Whole numbers: the first layer rounds nothing, so that the weights alone differ.
            weight.copy_(torch.randint(-3, 4, weight.shape, generator=generator))
    table = TokenTable(router, values)
    ids = torch.randint(0, 50, (3, 400), generator=generator)
    router_sees = torch.rand(3, 400, generator=generator) > 0.2
    read, tabled = None, None
    with torch.no_grad():
        for new, real in zip(ids.split(steps, 1), router_sees.split(steps, 1), strict=True):
            read = router.observe(read, Observation(new, real, values[new], values[new]))
            tabled = table.observe(tabled, new, real)
        newer = router_sees.flip(1).cumsum(1).flip(1).double() - router_sees.double()
        by_hand = torch.tensor(decay, dtype=torch.float64) ** newer * router_sees  # [B, T]
        total = (values[ids].double() * by_hand[..., None]).sum(1)
        exact = {"atol": 1e-12, "rtol": 1e-12}
        assert_close(read.weight, by_hand.sum(1), **exact)
        assert_close(tabled.weight, by_hand.sum(1), **exact)
        assert_close(read.total, total, **exact)
        assert_close(tabled.total, total @ router.decision.down.weight.double().T, **exact)
        plans = [
            select_blocks(pad(scores, (1, 1)), torch.full((3,), 4)).executed_sets
            for scores in (router.scores(read), table.scores(tabled))
        ]
    assert plans[0] == plans[1]


def test_where_pads_stand_changes_nothing_at_all():
    torch.manual_seed(0)
    tokens = torch.randn(1, 5, 8)
    left = torch.cat([torch.full((1, 3, 8), 1e6), tokens], 1)
    right = torch.cat([tokens, torch.full((1, 3, 8), 1e6)], 1)
    mask = torch.tensor([[False] * 3 + [True] * 5])
    plain = state_after(tokens, torch.ones(1, 5, dtype=torch.bool))
    for padded in (state_after(left, mask), state_after(right, mask.flip(1))):
        assert torch.equal(padded.pooled(), plain.pooled())
        assert torch.equal(padded.last, plain.last)


def test_decision_module_by_hand():
    module = DecisionModule(2, 3, DecisionConfig(rank=1, omega=0.1), torch.tensor([1.0, 0.0, -1.0]))
    with torch.no_grad():
        module.down.weight.copy_(torch.tensor([[1.0, 1.0]]))
        module.down.bias.fill_(0.0)
        module.up.weight.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    # silu(2) = 2 / (1 + e^-2) = 1.761594
    scores = module(torch.tensor([[0.5, 1.5]]))
    assert_close(scores, torch.tensor([[1.761594, 3.523188, 5.284782]]))
    assert_close(module.fuse(scores), torch.tensor([[1.861594, 3.523188, 5.184782]]))


def test_an_untrained_module_ranks_by_its_prior_alone():
    module = DecisionModule(4, 3, DecisionConfig(), torch.tensor([0.3, -0.2, 0.9]))
    fused = module.fuse(module(torch.randn(2, 4)))
    assert_close(fused, torch.tensor([[0.03, -0.02, 0.09]]).expand(2, 3))


def test_the_router_stays_in_float32_to_the_last_bit():
    module = DecisionModule(4, 3, DecisionConfig())
    before = {name: p.clone() for name, p in module.named_parameters()}
    holder = torch.nn.Sequential(module, torch.nn.Linear(3, 3)).to(torch.bfloat16)
    assert holder[1].weight.dtype == torch.bfloat16
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_autocast_does_not_reach_the_router():
    torch.manual_seed(0)
    module = DecisionModule(4, 3, DecisionConfig())
    torch.nn.init.normal_(module.up.weight)
    summary = torch.randn(2, 4)
    plain = module(summary)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(summary), plain)


def test_pooling_scores_is_not_pooling_tokens():
    torch.manual_seed(0)
    results = {}
    keys, values = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    seen = Observation(
        torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.bool), keys, values
    )
    for pool in ("tokens", "scores"):
        torch.manual_seed(1)
        router = Router(RouterConfig(num_blocks=6, token_width=4, planner=PlannerConfig(pool=pool)))
        torch.nn.init.normal_(router.decision.up.weight)
        results[pool] = router.scores(router.observe(None, seen))
        by_token = router.decision(values[0])
        if pool == "scores":
            assert_close(results[pool], by_token.mean(0, keepdim=True))
        else:
            assert_close(results[pool], router.decision(values.mean(1)))
    assert not torch.allclose(results["tokens"], results["scores"], atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"context_layer": 0},
        {"context_layer": 5},
        {"ema_decay": 1.0},
        {"pool": "scores", "summary": "mean+last"},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(PolicyError):
        PlannerConfig(**settings)


def test_config_round_trips_through_json():
    config = RouterConfig(
        num_blocks=6, token_width=4, planner=PlannerConfig(context="key", summary="ema")
    )
    assert build(RouterConfig, config.to_json(), "here") == config
