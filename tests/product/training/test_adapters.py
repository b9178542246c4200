"""LoRA layers as one function give what PEFT's own give, in values and gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.training.adapters import fast_adapters, is_plain
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import LoraSettings
from buddy.training.router.trainer import trained_parameters
from tests.tiny import random_ids, tiny_model


def adapted(family="llama", dtype=torch.float32, **settings):
    """With adapters that change what the model says."""
    model = add_lora(tiny_model(family).to(dtype), LoraSettings(**settings), 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=draw) / 8
    return BuddyForCausalLM(model)


def values_and_gradients(model, fast):
    """Of a pass through all blocks, the gradients of what is trained."""
    backbone = model.backbone
    ids = random_ids(3, 11)
    positions = torch.arange(11).expand(3, -1)
    hidden = backbone.embed(ids)
    rotary = backbone.rotary(hidden, positions)
    with fast_adapters(backbone) if fast else nullcontext():
        for block in range(backbone.num_blocks):
            hidden = backbone.run_block(block, hidden, None, positions, rotary, None)
        hidden.float().square().mean().backward()
    adapters, _ = trained_parameters(model)
    slopes = {name: one.grad for name, one in adapters.items()}
    for one in adapters.values():
        one.grad = None
    return hidden.detach(), slopes


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_they_equal_pefts_own(family):
    model = adapted(family, rank=4, alpha=6.0)
    ours, our_slopes = values_and_gradients(model, fast=True)
    theirs, their_slopes = values_and_gradients(model, fast=False)
    assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert our_slopes
    assert our_slopes.keys() == their_slopes.keys()
    assert any(slope.abs().max() > 1e-3 for slope in our_slopes.values())
    for name, slope in our_slopes.items():
        assert_close(slope, their_slopes[name], atol=1e-5, rtol=1e-3)


def test_in_bfloat16_their_gradients_are_those_of_float32_but_for_rounding():
    _, ours = values_and_gradients(adapted(dtype=torch.bfloat16), fast=True)
    _, theirs = values_and_gradients(adapted(dtype=torch.bfloat16), fast=False)
    _, exact = values_and_gradients(adapted(), fast=False)
    for name, slope in ours.items():
        assert slope.dtype == torch.float32
        wanted = exact[name]
        off = float((slope - wanted).norm() / wanted.norm())
        pefts = float((theirs[name] - wanted).norm() / wanted.norm())
        assert off < 0.02 + 2 * pefts, name


def test_layers_are_pefts_again_afterwards():
    model = adapted()
    layer = model.backbone.blocks[0].self_attn.q_proj
    own = type(layer).forward
    with fast_adapters(model.backbone):
        assert layer.forward.func is not own
    assert layer.forward.__func__ is own


def test_dropout_merged_disabled_and_second_adapters_are_left_to_peft():
    def first(model):
        return model.backbone.blocks[0].self_attn.q_proj

    assert is_plain(first(adapted()))
    assert not is_plain(first(adapted(dropout=0.1)))
    assert not is_plain(torch.nn.Linear(2, 2))
    merged = first(adapted())
    merged.merge()
    assert not is_plain(merged)
    disabled = first(adapted())
    disabled.enable_adapters(False)
    assert not is_plain(disabled)
