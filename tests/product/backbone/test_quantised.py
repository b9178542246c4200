"""Weights in fewer bits: how far they may be from what they stand for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from buddy import BuddyForCausalLM
from buddy.backbone.quantised import (
    GROUP,
    QuantisedLinear,
    quantise_backbone,
    quantise_int4,
    quantise_int8,
)
from tests.tiny import random_ids, tiny_model


@given(st.integers(0, 100), st.sampled_from([1e-6, 1.0, 1e4]))
def test_int8_is_within_half_a_step_of_each_weight(seed, size):
    weight = size * torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    values, scales = quantise_int8(weight)
    error = (values.float() * scales[:, None] - weight).abs()
    assert bool((error <= 0.5001 * scales[:, None]).all())


@given(st.integers(0, 100))
def test_int4_meets_each_groups_largest_and_is_within_a_step_of_the_rest(seed):
    linear = nn.Linear(2 * GROUP, 5, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)))
    made = QuantisedLinear(linear, "int4").widened(torch.float32)
    groups, found = linear.weight.view(-1, GROUP), made.view(-1, GROUP)
    largest = groups.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), groups.gather(1, largest))
    # On the far side of zero the scale ends one step earlier.
    assert bool(((found - groups).abs() <= 1.001 * groups.abs().amax(1, keepdim=True) / 8).all())


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_a_weight_of_a_bfloat16_model_is_the_same_number_in_every_format(quantisation):
    layer = QuantisedLinear(nn.Linear(2 * GROUP, 5).bfloat16(), quantisation)
    assert torch.equal(layer.widened(torch.bfloat16), layer.widened(torch.float32).bfloat16())


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_a_layer_of_more_weights_than_are_widened_at_a_time(monkeypatch, quantisation):
    layer = QuantisedLinear(nn.Linear(2 * GROUP, 7), quantisation)
    monkeypatch.setattr("buddy.backbone.quantised._AT_ONCE", 3 * 2 * GROUP)  # 3, 3 and 1 rows
    x = torch.randn(2, 4, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    expected = nn.functional.linear(x, layer.widened(x.dtype), layer.bias)
    torch.testing.assert_close(layer(x), expected)


def test_zero_weights_stay_zero():
    values, scales = quantise_int4(torch.zeros(2, GROUP))
    assert bool((values == 8 + (8 << 4)).all())
    assert bool((scales == 0).all())
    assert bool((quantise_int8(torch.zeros(2, 8))[0] == 0).all())


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_a_quantised_model_is_smaller_and_near(quantisation):
    plain = BuddyForCausalLM(tiny_model(), policy="full")
    made = BuddyForCausalLM(tiny_model(), policy="full")
    quantise_backbone(made.backbone, quantisation)
    ids = random_ids(2, 12)
    with torch.no_grad():
        expected, logits = plain(ids).logits, made(ids).logits
    error = float((logits - expected).norm() / expected.norm())
    assert 1e-4 < error < {"int8": 0.05, "int4": 0.6}[quantisation]
    assert sum(p.numel() for p in made.backbone.blocks.parameters()) < 1000  # norms and biases


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2.5"])  # the second has tied embeddings
def test_a_quantised_model_has_as_many_parameters_as_before(family, quantisation):
    model = BuddyForCausalLM(tiny_model(family), policy="full")
    asked = [{}, {"exclude_embeddings": True}]
    before = [model.num_parameters(**options) for options in asked]
    quantise_backbone(model.backbone, quantisation)
    assert [model.num_parameters(**options) for options in asked] == before
    assert model.num_parameters(only_trainable=True) < before[0] / 2


def test_scales_keep_their_number_format():
    linear = QuantisedLinear(nn.Linear(64, 5), "int8")
    before = linear.widened(torch.float32)
    linear.bfloat16()
    assert linear.scales.dtype == torch.float32
    assert torch.equal(linear.widened(torch.float32), before)
