"""Weights in fewer bits: how far they may be from what they stand for."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from buddy import BuddyForCausalLM
from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.memory import LINE
from buddy.backbone.quantised import (
    GROUP,
    QuantisedLinear,
    quantise_backbone,
    quantise_int4,
    quantise_int8,
)
from buddy.errors import ModelError, PromptError
from tests.tiny import CONFIGS, random_ids, tiny_model

TIED = [name for name, config in CONFIGS.items() if config.tie_word_embeddings]


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
    made = QuantisedLinear.of(linear, "int4").widened(torch.float32)
    groups, found = linear.weight.view(-1, GROUP), made.view(-1, GROUP)
    largest = groups.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), groups.gather(1, largest))
    # On the far side of zero the scale ends one step earlier.
    assert bool(((found - groups).abs() <= 1.001 * groups.abs().amax(1, keepdim=True) / 8).all())


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_a_weight_of_a_bfloat16_model_is_the_same_number_in_every_format(quantisation):
    layer = QuantisedLinear.of(nn.Linear(2 * GROUP, 5).bfloat16(), quantisation)
    assert torch.equal(layer.widened(torch.bfloat16), layer.widened(torch.float32).bfloat16())


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_a_layer_of_more_weights_than_are_widened_at_a_time(monkeypatch, quantisation):
    layer = QuantisedLinear.of(nn.Linear(2 * GROUP, 7), quantisation)
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
    linear = QuantisedLinear.of(nn.Linear(64, 5), "int8")
    before = linear.widened(torch.float32)
    linear.bfloat16()
    assert linear.scales.dtype == torch.float32
    assert torch.equal(linear.widened(torch.float32), before)


@pytest.mark.parametrize("family", TIED)
@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_tied_embedding_is_the_quantised_heads_rows(family, quantisation, dtype):
    plain, made = (Backbone(tiny_model(family).to(dtype)) for _ in range(2))
    quantise_backbone(made, quantisation)
    plain.embedding.weight.copy_(made.head.widened(dtype))  # and scales rows as the family does
    ids = random_ids(3, 9)
    assert torch.equal(made.embed(ids), plain.embed(ids))
    assert made.dtype == dtype
    assert not any(tensor.shape == plain.embedding.weight.shape for tensor in floats_of(made))


def floats_of(backbone):
    """All floating point numbers that a backbone's model keeps."""
    tensors = (*backbone._model.parameters(), *backbone._model.buffers())
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def test_an_embedding_of_its_own_stays_as_it_is():
    backbone = Backbone(tiny_model("llama"))
    table = backbone.embedding.weight
    quantise_backbone(backbone, "int8")
    assert backbone.embedding.weight is table


@pytest.mark.parametrize("family", ["llama3", "gemma"])
@torch.no_grad()
def test_transformers_own_forward_and_a_model_that_moves_read_the_same_rows(family):
    backbone = Backbone(tiny_model(family))
    quantise_backbone(backbone, "int8")
    ids = random_ids(1, 5)
    hidden, positions = backbone.embed(ids), torch.arange(5)[None]
    rotary = backbone.rotary(hidden, positions)
    for block in range(backbone.num_blocks):
        hidden = backbone.run_block(block, hidden, None, positions, rotary, None)
    torch.testing.assert_close(backbone.own_logits(ids), backbone.logits(hidden))
    backbone._model.bfloat16()
    assert backbone.dtype == torch.bfloat16
    assert backbone.embed(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", [-1, 97])
def test_an_id_that_is_no_row_is_refused(wrong):
    backbone = Backbone(tiny_model("llama3"))
    quantise_backbone(backbone, "int8")
    with pytest.raises(PromptError, match="not one of the model's 97"):
        backbone.embed(torch.tensor([[3, wrong]]))


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_an_adapter_that_is_not_merged_is_refused(target):
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(ModelError, match="merge the adapter before quantising"):
        quantise_backbone(Backbone(adapted.get_base_model()), "int8")


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@torch.no_grad()
def test_every_weight_is_given_back_in_parts_after_its_last_use(monkeypatch, quantisation):
    expected, made = (Backbone(tiny_model("llama3")) for _ in range(2))
    weights = [*made.blocks.parameters(), made.embedding.weight]
    quantise_backbone(expected, quantisation)
    monkeypatch.setattr("buddy.backbone.quantised._ROUNDED_AT_ONCE", 10 * 32)  # ten rows, or fewer
    parts = []

    def release(part):
        parts.append(part.numel())
        part.fill_(torch.nan)  # as a page may hold anything

    quantise_backbone(made, quantisation, release)
    ids = random_ids(2, 6)
    assert torch.equal(made.own_logits(ids), expected.own_logits(ids))
    assert all(bool(weight.isnan().all()) for weight in weights if weight.ndim > 1)
    assert parts.count(10 * 32) > 9


def test_a_fingerprint_gives_each_weight_back_and_stays_the_same():
    model, seen = tiny_model("llama3"), []
    assert base_fingerprint(model, lambda weight: seen.append(id(weight))) == base_fingerprint(
        model
    )
    assert seen == [id(weight) for weight in model.parameters()]


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_weights_lie_side_by_side_each_at_a_cache_line(quantisation):
    backbone = Backbone(tiny_model("llama3"))
    quantise_backbone(backbone, quantisation)
    layers = [m for m in backbone._model.modules() if isinstance(m, QuantisedLinear)]
    parts = sorted(
        {(t.data_ptr(), t.nbytes) for layer in layers for t in (layer.weight, layer.scales)}
    )
    assert all(first % LINE == 0 for first, _ in parts)
    for layer in layers:  # what is written of one takes nothing of those beside it
        assert len(pickle.dumps(layer.weight)) < layer.weight.nbytes + 2000
    for (first, size), (second, _) in itertools.pairwise(parts):
        assert 0 <= second - first - size < LINE
