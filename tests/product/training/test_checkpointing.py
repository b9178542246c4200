"""Activation checkpointing: the gradients of a step without it, from less that is kept."""

import copy

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.training import packing
from buddy.training.attention import is_grouped
from buddy.training.recipe import DataSettings
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import (
    BudgetSettings,
    LoraSettings,
    OptimSettings,
    Recipe,
    RouterSettings,
)
from buddy.training.router.trainer import JointTrainer
from tests.product.training.examples import random_examples
from tests.tiny import CONFIGS, random_router, tiny_model

EXAMPLES = random_examples(8)
MIXED = {"relaxation": "gumbel", "second_route": 0.5}


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 8)  # else rectangles of tiny examples are as good


def step(is_checkpointed, *, family="llama", attention="sdpa", dropout=0.0, **router):
    """A trainer whose parameters have the gradients of a batch, and what its rows gave."""
    model = tiny_model(family, attention=attention)
    depths = BudgetSettings(full_prompts=0.7, mixed_answers=0.5, stretch=2)
    recipe = Recipe(
        data=DataSettings(train=(Source(path="unused"),)),
        router=RouterSettings(**router),
        optim=OptimSettings(batch_size=4, steps=2, activation_checkpointing=is_checkpointed),
        budget=BudgetSettings() if "method" in router else depths,
        lora=LoraSettings(rank=2, dropout=dropout),
    )
    made = random_router(model, scale=0.5)
    wrapped = BuddyForCausalLM(add_lora(model, recipe.lora, seed=0), router=made).train()
    trainer = JointTrainer(wrapped, recipe, EXAMPLES)
    with torch.no_grad():
        for parameter in trainer.parameters.values():
            parameter.add_(0.05)  # B starts at zero, and A would have no slope
    torch.manual_seed(3)
    return trainer, trainer._backward(EXAMPLES[:4], seed=5, step=0)


@pytest.mark.parametrize(
    "settings",
    [
        MIXED,
        {**MIXED, "dense_share": 1.0, "attention": "eager"},
        {**MIXED, "dropout": 0.3},
        {"method": "policy-gradient"},
        {**MIXED, "family": "gemma3_text"},
    ],
)
def test_gradients_are_bit_for_bit_those_without(settings):
    settings = dict(settings)
    (whole, rows), (made, found) = (step(on, **settings) for on in (False, True))
    assert found == rows
    assert not is_grouped(made.model.backbone)
    for name, parameter in whole.parameters.items():
        assert torch.equal(made.parameters[name].grad, parameter.grad), name
        assert parameter.grad.any()


def test_blocks_are_as_they_were_after_a_step():
    trainer, _ = step(True)
    assert not any("forward" in vars(block) for block in trainer.model.backbone.blocks)


def test_a_deep_model_keeps_a_third_of_the_activations(monkeypatch):
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers = 24
    monkeypatch.setitem(CONFIGS, "llama", config)
    most = {}
    for is_checkpointed in (False, True):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer, _ = step(is_checkpointed, **MIXED)
        for weights in (*trainer.model.parameters(), *trainer.model.buffers()):
            kept.pop(weights.untyped_storage().data_ptr(), None)
        most[is_checkpointed] = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    again = most[False] / 24  # of one block, while it is computed again
    assert most[True] + again <= 0.35 * most[False]
