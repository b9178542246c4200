import math

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import PolicyError
from buddy.importance.search.orders import ascending_order
from buddy.routing.prior import PriorConfig, normalise_prior

RAW = torch.tensor([4.0, -1.0, 1.0, 3.0, 0.5])  # clipped at 0: 4, 0, 1, 3, 0.5


def test_rank_by_hand():
    # ranks 4, 0, 2, 3, 1 of 5: u = (1 + rank) / 6
    u = normalise_prior(RAW, PriorConfig(standardise=False))
    assert_close(u, torch.tensor([5, 1, 3, 4, 2]) / 6)


def test_rank_ignores_the_steps_before_it():
    for tail in ("log", "box-cox", "none"):
        config = PriorConfig(heavy_tail=tail, clip=2.5, standardise=False)
        assert_close(normalise_prior(RAW, config), torch.tensor([5, 1, 3, 4, 2]) / 6)


def test_clipping_makes_no_ties():
    importance = torch.cat([torch.linspace(1, 2, 25), torch.tensor([40.0, 20.0, 30.0])])
    ranks = [
        normalise_prior(importance, PriorConfig(clip=clip)).argsort().tolist()
        for clip in (None, 3.0)
    ]
    assert ranks[0] == ranks[1] == [*range(25), 26, 27, 25]


def test_of_equals_the_deeper_goes_first_as_in_an_order():
    importance = [9.0, 0.0, -1.0, 0.0, 5.0, 0.0]
    removed = normalise_prior(torch.tensor(importance)).argsort().tolist()
    assert removed == ascending_order(importance) == [2, 5, 3, 1, 4, 0]


def test_a_model_without_middle_blocks_has_an_empty_prior():
    assert normalise_prior(torch.tensor([1.0, 2.0])[1:-1]).shape == (0,)


def test_sigmoid_by_hand():
    # x = 4, 0, 1, 3, 0.5: median 1, quartiles 0.5 and 3, z = (x - 1) / 2.5
    config = PriorConfig(squash="sigmoid", tau=2.0, standardise=False)
    z = (torch.tensor([4.0, 0.0, 1.0, 3.0, 0.5]) - 1) / 2.5
    assert_close(normalise_prior(RAW, config), torch.sigmoid(z / 2), atol=1e-5, rtol=0)


def test_clip_bounds_the_robust_z():
    config = PriorConfig(squash="sigmoid", clip=1.0, standardise=False)
    assert float(normalise_prior(RAW, config).max()) == pytest.approx(1 / (1 + math.exp(-1)))


def test_heavy_tails_by_hand():
    x = torch.tensor([0.0, 1.0, 3.0])
    # log(1 + x) = 0, ln 2, ln 4: median ln 2, quartiles ln(2)/2 and 1.5 ln 2, z = -1, 0, 1
    log = PriorConfig(heavy_tail="log", squash="sigmoid", standardise=False)
    expected = torch.sigmoid(torch.tensor([-1.0, 0.0, 1.0]))
    assert_close(normalise_prior(x, log), expected, atol=1e-5, rtol=0)
    # Box-Cox, lambda 0.5: 2 (sqrt(x) - 1) = -2, 0, 1.4641: median 0, quartiles -1 and 0.7321,
    # z = -2 / 1.7321, 0, 1.4641 / 1.7321
    box = PriorConfig(heavy_tail="box-cox", box_cox_lambda=0.5, squash="sigmoid", standardise=False)
    z = torch.tensor([-1.154701, 0.0, 0.845299])
    assert_close(normalise_prior(x, box), torch.sigmoid(z), atol=1e-5, rtol=0)


def test_standardise_is_the_last_step():
    prior = normalise_prior(RAW)
    assert float(prior.mean()) == pytest.approx(0, abs=1e-6)
    assert float(prior.std(correction=0)) == pytest.approx(1, abs=1e-4)


def test_bad_importance_and_settings_are_refused():
    with pytest.raises(PolicyError, match="NaN"):
        normalise_prior(torch.tensor([1.0, float("nan")]))
    with pytest.raises(PolicyError, match="tau must be above 0"):
        PriorConfig(squash="sigmoid", tau=0.0)
