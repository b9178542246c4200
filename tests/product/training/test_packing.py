"""Passes without padding: what they compute, and that it is what passes over rectangles compute."""

import pytest
import torch
from torch.testing import assert_close

from buddy.engine.naive import naive_hidden
from buddy.training import packing
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.router.choosing import plain_choice
from buddy.training.router.straight_through import straight_through_pass
from tests.product.training.examples import random_examples
from tests.product.training.test_straight_through import by_token, mixed_depths, tokens_computed
from tests.tiny import NUM_BLOCKS, all_families, every_family, tiny_buddy


@pytest.fixture(scope="module")
def batch():
    made = collate(random_examples(4))
    assert made.is_pad.any()
    return made


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 8)  # else rectangles of tiny examples are as good


def run(model, batch, depths):
    choose = plain_choice(model.policy)
    return straight_through_pass(model.backbone, model.policy, batch, depths, choose)


@every_family
def test_tokens_equal_the_naive_reference(family, batch):
    model = tiny_buddy(family)
    depths = mixed_depths(batch)
    with fast_passes(model.backbone):
        out = run(model, batch, depths)
    for row in range(4):
        ids, runs = by_token(model, batch, depths, row)
        expected = naive_hidden(model.backbone, ids, runs, "project")
        assert_close(out.hidden[row, : len(ids)], expected, atol=2e-4, rtol=1e-4)


@all_families
def test_plans_tokens_and_gradients_equal_those_over_rectangles(family, batch):
    model = tiny_buddy(family)
    depths = mixed_depths(batch, seed=1)
    weights = [
        p for name, p in model.model.named_parameters() if "layers.2" in name or ".2." in name
    ]

    def measured(out):
        hidden = out.hidden[batch.rows, batch.columns]
        return hidden, torch.autograd.grad(hidden.square().sum(), weights, allow_unused=True)

    whole = run(model, batch, depths)
    with fast_passes(model.backbone):
        packed = run(model, batch, depths)
    assert packed.lanes_plan == whole.lanes_plan
    (hidden, slopes), (expected, expected_slopes) = measured(packed), measured(whole)
    assert_close(hidden, expected, atol=2e-4, rtol=1e-4)
    largest = max(float(one.abs().max()) for one in expected_slopes if one is not None)
    assert largest > 0
    for one, other in zip(slopes, expected_slopes, strict=True):
        assert_close(one, other, atol=1e-4 * largest, rtol=1e-3)


def test_a_block_computes_the_tokens_that_run_it_and_no_others(batch, monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 1)
    model = tiny_buddy()
    computed = tokens_computed(model, monkeypatch)
    with fast_passes(model.backbone):
        out = run(model, batch, mixed_depths(batch))
    ran = out.lanes_plan.mask & ~batch.is_pad.flatten()[:, None]
    assert computed == ran.sum(0).tolist()
    assert len(computed) == NUM_BLOCKS
