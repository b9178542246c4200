"""Adapters under the plans of a router that was fitted before: it stays as it was, bit for bit."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.depth.select import select_blocks
from buddy.errors import RecipeError, TrainingError
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train
from tests.product.training.made import write_recipe
from tests.tiny import random_ids, random_router, tiny_model
from tests.words import word_tokenizer

FROZEN = ("lora.keep_context=true", "optim.router_learning_rate=0")
PRIOR = torch.tensor([0.4, -0.2, 0.1, -0.3])


def save_routed(folder, *, seed=1, prior=PRIOR):
    """A checkpoint as `buddy route` leaves it: a router on untouched weights, and a prior."""
    base = BuddyForCausalLM.from_pretrained(folder / "base")
    router = random_router(base.model, seed=seed)
    routed = BuddyForCausalLM(base.model, router=router, prior=prior, origin=base.origin)
    routed.save_pretrained(folder / "stage1")
    return routed


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    save_routed(tmp_path)
    write_recipe(tmp_path, optim__steps=2, log__save_every=2, log__evaluate_budgets=["4 blocks"])
    return tmp_path


def train_in(folder, *sets, out="out", resume=False):
    recipe = read_recipe(Recipe, folder / "recipe.toml", sets)
    return BuddyForCausalLM.from_pretrained(train(recipe, folder / out, resume=resume))


@torch.no_grad()
def plans(model, ids, blocks):
    return model(ids, budget=f"{blocks} blocks", use_cache=False).plan.mask


def test_the_router_stays_and_the_adapters_grow_under_its_plans(folder):
    routed = BuddyForCausalLM.from_pretrained(folder / "stage1")
    trained = train_in(folder, *FROZEN)
    assert trained.policy_spec == "routed"
    for name, value in routed.router.state_dict().items():
        assert torch.equal(trained.router.state_dict()[name], value), name
    assert any(p.any() for name, p in trained.model.named_parameters() if "lora_B" in name)
    ids = random_ids(6, 7)
    expected = plans(routed, ids, 4)
    assert len(torch.unique(expected, dim=0)) > 1  # prompts have plans of their own
    assert torch.equal(plans(trained, ids, 4), expected)


def test_one_order_is_that_of_the_checkpoint(folder):
    trained = train_in(folder, "router.policy=static")
    assert trained.router is None
    scores = torch.cat([torch.ones(1), PRIOR, torch.ones(1)])[None]
    expected = select_blocks(scores, torch.tensor([4])).mask
    assert torch.equal(plans(trained, random_ids(2, 5), 4), expected.expand(2, -1))


@pytest.mark.parametrize(
    ("policy", "other"), [("routed", {"seed": 2}), ("static", {"prior": -PRIOR})]
)
def test_a_run_does_not_go_on_under_other_plans(folder, policy, other):
    sets = (*FROZEN, f"router.policy={policy}")
    train_in(folder, *sets)
    train_in(folder, *sets, resume=True)
    save_routed(folder, **other)
    with pytest.raises(TrainingError, match="is the state of another run"):
        train_in(folder, *sets, resume=True)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("router.rank=8", *FROZEN), r"router\.rank is of a new router"),
        (("router.omega=0.5", *FROZEN), r"router\.omega is of a new router"),
        (("router.standardise=true", *FROZEN), r"router\.standardise is of a new router"),
        (FROZEN[:1], r"stays as it was fitted: set optim\.router_learning_rate to 0"),
        (FROZEN[1:], r"stays as it was fitted: set lora\.keep_context to true"),
    ],
)
def test_what_would_change_the_router_is_refused_by_name(folder, sets, words):
    with pytest.raises(RecipeError, match=words):
        train_in(folder, *sets)
    assert not (folder / "out").exists()


def test_a_checkpoint_with_adapters_is_no_base_of_others(folder):
    train_in(folder, *FROZEN)
    name = folder / "out" / "checkpoint"
    with pytest.raises(RecipeError, match="is trained already and has adapters"):
        train_in(folder, *FROZEN, f"model.name={name}", out="more")
