"""GRPO by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import RecipeError
from buddy.training.losses import group_advantages
from buddy.training.predictor.grpo import GRPOSettings, grpo_loss, rewards, sample_budgets


def test_rewards_by_hand():
    found = rewards(torch.tensor([[2.0, 1.5]]), torch.tensor([[3, 30]]), 30, GRPOSettings())
    # -5 * 2 - 0.05 * 3/30 and -5 * 1.5 - 0.05 * 1
    assert_close(found, torch.tensor([[-10.005, -7.55]]))


def test_advantages_by_hand():
    found = group_advantages(torch.tensor([[1.0, 2.0, 3.0, 6.0], [4.0, 4.0, 4.0, 4.0]]))
    # mean 3, deviations -2 -1 0 3, population variance 14/4
    std = math.sqrt(3.5)
    assert_close(found[0], torch.tensor([-2 / std, -1 / std, 0.0, 3 / std]))
    assert found[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("samples", [2, 3, 4, 5, 7, 8])
def test_a_group_of_equal_rewards_has_no_advantage(samples):
    draw = torch.Generator().manual_seed(0)
    rewards = -15 * torch.rand(500, 1, generator=draw)
    found = group_advantages(rewards.expand(-1, samples).contiguous())
    # atol: what rounding in float64 leaves, over epsilon
    assert_close(found, torch.zeros(500, samples), atol=1e-6, rtol=0)


def test_loss_and_its_gradient_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)  # pi = 1/4, 3/4
    blocks = torch.tensor([[3, 4, 4, 3]])
    advantages = torch.tensor([[1.0, -1.0, 2.0, -2.0]])
    out = grpo_loss(logits, blocks, advantages, GRPOSettings(entropy=0.5))
    low, high = math.log(0.25), math.log(0.75)
    entropy = -(0.25 * low + 0.75 * high)
    # sum of A log pi: (1 - 2) low + (-1 + 2) high, over four samples
    expected = -(high - low) / 4 - 0.5 * entropy
    assert_close(out.loss.item(), expected)
    assert_close(out.entropy.item(), entropy)
    out.loss.backward()
    # d/dz of the policy term: -(1/4)(-1, 1); d entropy / dz_j = -pi_j (log pi_j + entropy)
    by_hand = [
        0.25 + 0.5 * 0.25 * (low + entropy),
        -0.25 + 0.5 * 0.75 * (high + entropy),
    ]
    assert_close(logits.grad[0], torch.tensor(by_hand))


def test_what_is_impossible_is_never_drawn_and_breaks_no_gradient():
    raw = torch.tensor([[1.0, 0.5, -0.5]], requires_grad=True)
    logits = torch.cat([torch.full((1, 1), -torch.inf), raw], 1)
    drawn = sample_budgets(logits, 500, seed=1)
    assert sorted(set(drawn[0].tolist())) == [4, 5, 6]
    out = grpo_loss(logits, drawn[:, :4], torch.randn(1, 4), GRPOSettings())
    same = grpo_loss(raw, drawn[:, :4] - 1, torch.zeros(1, 4), GRPOSettings())
    assert_close(out.entropy, same.entropy)
    out.loss.backward()
    assert raw.grad.isfinite().all()


def test_draws_follow_the_policy_and_the_seed():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1]]))
    drawn = sample_budgets(logits, 20_000, seed=3)
    share = torch.stack([(drawn == blocks).double().mean(1) for blocks in (3, 4, 5)], 1)
    # atol: three standard errors of 20,000 draws
    assert_close(share, logits.exp().double(), atol=0.011, rtol=0)
    assert torch.equal(drawn, sample_budgets(logits, 20_000, seed=3))
    assert not torch.equal(drawn, sample_budgets(logits, 20_000, seed=4))


@pytest.mark.parametrize(
    "settings", [{"samples": 1}, {"lambda_cost": -0.1}, {"epsilon": 0.0}, {"entropy": -1.0}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(RecipeError):
        GRPOSettings(**settings)
