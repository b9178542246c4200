import math

import pytest
import torch
from torch.testing import assert_close

from buddy.training.router.relaxation import SigmoidGates, gumbel_noise, make_gates, plan_log_prob

MASK = torch.tensor([[True, True, False, False], [False, True, False, True]])


@pytest.mark.parametrize("name", ["softmax", "scaled-softmax", "sigmoid", "gumbel"])
def test_the_gates_derivative_is_that_of_finite_differences(name):
    gates = make_gates(name, 0.7)
    torch.manual_seed(0)
    # Kept scores lie above dropped ones, as a top-k leaves them.
    scores = (torch.rand(2, 4, dtype=torch.float64) + 2 * MASK).requires_grad_()
    boundary = 0.5 * (
        scores.detach().masked_fill(~MASK, torch.inf).amin(1)
        + scores.detach().masked_fill(MASK, -torch.inf).amax(1)
    )

    def value(x):
        # The boundary is a constant of the derivative.
        return torch.sigmoid((x - boundary[:, None]) / 0.7) if name == "sigmoid" else gates(x, MASK)

    weights = torch.rand(2, 4, dtype=torch.float64)
    (gates(scores, MASK) * weights).sum().backward()
    step = 1e-6
    for row in range(2):
        for block in range(4):
            moved = torch.zeros(2, 4, dtype=torch.float64)
            moved[row, block] = step
            with torch.no_grad():
                change = value(scores + moved) - value(scores - moved)
            by_hand = (change * weights).sum() / (2 * step)
            assert_close(scores.grad[row, block], by_hand, atol=1e-8, rtol=1e-6)
    assert scores.grad.abs().min() > 1e-4


def test_softmax_by_hand_and_what_its_scale_is():
    scores = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    gates = make_gates("softmax", 1.0)(scores, torch.tensor([[False, True]]))
    assert_close(gates[0], torch.tensor([0.25, 0.75]))
    gates[0, 1].backward()
    # p (1 - p) on the diagonal, -p q beside it
    assert_close(scores.grad[0], torch.tensor([-0.1875, 0.1875]))
    scores.grad = None
    make_gates("scaled-softmax", 1.0)(scores, torch.tensor([[False, True]]))[0, 1].backward()
    assert_close(scores.grad[0], torch.tensor([-0.375, 0.375]))


def test_gates_of_skipped_blocks_share_one_softmax_and_others_have_no_gradient():
    scores = torch.tensor(
        [[2.0, 0.0, 1.0, math.log(3.0)], [1.0, 2.0, 3.0, 4.0]], requires_grad=True
    )
    mask = torch.tensor([[True, False, True, False], [True] * 4])
    gates = make_gates("skipped-softmax", 1.0)(scores, mask)
    assert_close(gates, torch.tensor([[0, 0.25, 0, 0.75], [0, 0, 0, 0]]))
    (gates * torch.tensor([[5.0, 1.0, 7.0, 3.0], [1.0, 2.0, 3.0, 4.0]])).sum().backward()
    # p q times the difference of 2, as of a softmax of two
    assert_close(scores.grad, torch.tensor([[0, -0.375, 0, 0.375], [0, 0, 0, 0]]))


def test_sigmoid_is_one_half_in_the_middle_between_kept_and_dropped():
    scores = torch.tensor([[3.0, 1.0, -1.0]])
    gates = SigmoidGates(2.0)(scores, torch.tensor([[True, True, False]]))
    assert_close(gates[0], torch.sigmoid(torch.tensor([1.5, 0.5, -0.5])))


def test_sigmoid_where_all_or_none_of_the_blocks_run():
    scores = torch.tensor([[3.0, 1.0], [3.0, 1.0]])
    gates = SigmoidGates(1.0)(scores, torch.tensor([[True, True], [False, False]]))
    assert_close(gates, torch.sigmoid(torch.tensor([[2.0, 0.0], [0.0, -2.0]])))


def test_noise_belongs_to_the_row_whoever_draws_it():
    whole = gumbel_noise(range(4), 5, seed=7)
    assert torch.equal(gumbel_noise([1, 3], 5, seed=7), whole[[1, 3]])
    assert not torch.equal(gumbel_noise(range(4), 5, seed=8), whole)
    many = gumbel_noise(range(20_000), 1, seed=0)
    # Mean of the Gumbel law is Euler's constant, its deviation pi / sqrt(6): 0.009 of error here.
    assert abs(float(many.mean()) - 0.5772) < 0.04


def test_log_probability_of_a_plan_by_hand():
    scores = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]], requires_grad=True)
    noisy = torch.tensor([[1.0, 3.0, 2.0]])  # drawn second, then third
    log_prob = plan_log_prob(scores, noisy, torch.tensor([[False, True, True]]))
    # 2 of 8, then 5 of the 6 that are left
    assert_close(log_prob, torch.tensor([math.log(2 / 8 * 5 / 6)]))
    log_prob.sum().backward()
    by_hand = [-1 / 8 - 1 / 6, 1 - 2 / 8, -5 / 8 + 1 - 5 / 6]
    assert_close(scores.grad[0], torch.tensor(by_hand))
