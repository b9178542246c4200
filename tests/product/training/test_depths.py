"""A run that trains adapters which know the depth, from recipe to checkpoint and on from there."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.errors import RecipeError
from buddy.methods.layerskip.recipe import LayerSkipRecipe
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train
from tests.product.training.made import write_recipe
from tests.tiny import random_ids, tiny_model
from tests.words import word_tokenizer

KNOWS = 'lora.depths=["3 blocks", "6 blocks"]'
ORDER = ("router.policy=static:3,2,4,1", "router.prior=none")


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "stage1")
    word_tokenizer().save_pretrained(tmp_path / "stage1")
    write_recipe(tmp_path, optim__steps=4, log__save_every=2, log__evaluate_budgets=["4 blocks"])
    return tmp_path


def train_in(folder, *sets, out="out", **how):
    recipe = read_recipe(Recipe, folder / "recipe.toml", [*ORDER, *sets])
    return train(recipe, folder / out, **how)


@torch.no_grad()
def said(model):
    return model(random_ids(1, 6), budget="4 blocks", use_cache=False).logits


def test_scales_are_trained_saved_and_gone_on_from(folder):
    checkpoint = train_in(folder, KNOWS)
    trained = BuddyForCausalLM.from_pretrained(checkpoint)
    weight = trained.depth_scales.weight
    assert trained.depth_scales.config.depths == (3, 6)
    assert (weight.abs().amax((0, 2)) > 1e-4).all()
    start = f"lora.start={checkpoint}"
    with pytest.raises(RecipeError, match=r'at "3 blocks", "6 blocks": set lora\.depths'):
        train_in(folder, start, out="more")
    with pytest.raises(RecipeError, match="know the depth at"):
        train_in(folder, start, 'lora.depths=["3 blocks", "5 blocks"]', out="more")
    more = train_in(folder, start, KNOWS, "optim.learning_rate=1e-9", out="more")
    gone_on = BuddyForCausalLM.from_pretrained(more)
    torch.testing.assert_close(said(gone_on), said(trained), atol=1e-4, rtol=1e-4)


def test_scales_begin_at_one_on_plain_adapters_that_are_trained_on(folder):
    plain = train_in(folder)
    assert BuddyForCausalLM.from_pretrained(plain).depth_scales is None
    start = (f"lora.start={plain}", "optim.learning_rate=1e-9")
    found = [
        BuddyForCausalLM.from_pretrained(train_in(folder, *start, *more, out=f"more{len(more)}"))
        for more in ((KNOWS,), ())
    ]
    assert found[0].depth_scales is not None
    torch.testing.assert_close(*map(said, found), atol=1e-5, rtol=1e-5)


def test_a_run_with_scales_that_was_stopped_ends_as_one_that_was_not(folder):
    stop = "optim.schedule=constant"
    whole = BuddyForCausalLM.from_pretrained(train_in(folder, KNOWS, stop))
    train_in(folder, KNOWS, stop, "optim.steps=2", out="parts")
    parts = BuddyForCausalLM.from_pretrained(
        train_in(folder, KNOWS, stop, out="parts", resume=True)
    )
    assert whole.facts() == parts.facts()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("optim.fsdp=true",), r"optim\.fsdp runs blocks without saying"),
        (("router.policy=routed", "router.method=measured"), "method measured runs blocks"),
        (("router.policy=routed", "router.planner.context_layer=2"), "context_layer is 2: set it"),
        (('lora.depths=["4 blocks"]',), "two budgets or more"),
        (('lora.depths=["4 blocks", "7 blocks"]',), "7"),
    ],
)
def test_what_they_do_not_go_with_is_refused_by_name(folder, sets, words):
    with pytest.raises((RecipeError, ValueError), match=words):
        train_in(folder, KNOWS, *sets)
    assert not (folder / "out").exists()


def test_a_method_without_budgets_has_none(folder):
    with pytest.raises(RecipeError, match=r"lora\.depths: layerskip draws no budget"):
        read_recipe(LayerSkipRecipe, folder / "recipe.toml", [KNOWS])
