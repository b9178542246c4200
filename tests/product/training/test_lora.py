"""Adapters everywhere, or everywhere but on what the router reads."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.errors import CheckpointError, ModelError, RecipeError
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.recipe import AdaptedModelSettings, DataSettings
from buddy.training.router.lora import add_lora, context_layers
from buddy.training.router.model import build_model
from buddy.training.router.recipe import (
    BudgetSettings,
    LogSettings,
    LoraSettings,
    Recipe,
    RouterSettings,
)
from buddy.training.router.trainer import trained_parameters
from tests.product.training.examples import random_examples
from tests.tiny import FAMILY_NAMES, random_router, tiny_model

EXAMPLES = random_examples(3)


def adapted(name, context_layer, *, keep):
    """With adapters as large as if they had been trained."""
    model = tiny_model(name)
    router = random_router(model, context="key+value", context_layer=context_layer)
    backbone = BuddyForCausalLM(model).backbone
    without = context_layers(model, backbone, context_layer) if keep else ()
    made = BuddyForCausalLM(add_lora(model, LoraSettings(), 0, without), router=router)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


@pytest.mark.parametrize("context_layer", [1, 2])
@pytest.mark.parametrize("name", [*FAMILY_NAMES, "olmo2", "phi3"])
def test_without_adapters_on_the_context_prompts_look_as_before(name, context_layer):
    model = tiny_model(name)
    router = random_router(model, context="key+value", context_layer=context_layer)
    before = RewardModel(BuddyForCausalLM(model, router=router)).summaries(EXAMPLES)
    kept, changed = (
        RewardModel(adapted(name, context_layer, keep=keep)).summaries(EXAMPLES)
        for keep in (True, False)
    )
    assert torch.equal(kept, before)
    assert not torch.allclose(changed, before, atol=0.1)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts_has_none(name):
    model = tiny_model(name)
    with pytest.raises(ModelError, match=r"lora\.rank = 0"):
        add_lora(model, LoraSettings(), 0)
    assert add_lora(model, LoraSettings(rank=0), 0) is model


def test_all_other_linear_layers_have_one():
    with_all, kept = (adapted("llama", 1, keep=keep) for keep in (False, True))
    names, fewer = (
        {name.split(".lora_")[0] for name, _ in made.model.named_parameters() if "lora_" in name}
        for made in (with_all, kept)
    )
    gone = {name.rsplit("layers.", 1)[1] for name in names - fewer}
    assert gone == {"0.self_attn.k_proj", "0.self_attn.v_proj"}
    assert fewer < names


@pytest.fixture
def trained(tmp_path):
    """A checkpoint with adapters as large as if they had been trained, and its base model."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    made = BuddyForCausalLM(add_lora(model.model, LoraSettings(rank=4), 0), origin=model.origin)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    made.save_pretrained(tmp_path / "trained")
    return tmp_path


def from_trained(folder, **lora):
    recipe = Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=16),
        model=AdaptedModelSettings(name=str(folder / "base"), dtype="float32"),
        lora=LoraSettings(start=str(folder / "trained"), **lora),
        router=RouterSettings(policy="full", prior="none"),
        budget=BudgetSettings(choices=("1.0",)),
        log=LogSettings(evaluate_budgets=("1.0",)),
    )
    return build_model(recipe, recipe.model.name)


def test_adapters_are_trained_on_from_a_checkpoint(trained):
    expected = BuddyForCausalLM.from_pretrained(trained / "trained")
    model = from_trained(trained, rank=4)
    ids = torch.arange(5)[None]
    assert torch.equal(model.eval()(ids).logits, expected(ids).logits)
    assert all(weights.requires_grad for weights in trained_parameters(model)[0].values())


def test_adapters_of_another_rank_scale_or_base_model_are_no_start(trained):
    with pytest.raises(RecipeError, match="another rank or other layers"):
        from_trained(trained, rank=8)
    with pytest.raises(RecipeError, match=r"multiplied by 4 .* by 8: set lora\.alpha to 16$"):
        from_trained(trained, rank=4, alpha=32.0)
    with torch.no_grad():
        other = tiny_model()
        other.lm_head.weight.add_(1)
    other.save_pretrained(trained / "base")
    with pytest.raises(CheckpointError, match="made for another base model"):
        from_trained(trained, rank=4)
