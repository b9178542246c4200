"""Adapters under PuDDing's sets: the classifier stays, and chooses what it chose before them."""

import json

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.errors import TrainingError
from buddy.methods.pudding.policy import PuddingPolicy
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train
from tests.product.policies.made import random_pudding
from tests.product.training.made import write_rows
from tests.tiny import random_ids, tiny_model
from tests.words import word_tokenizer


def save_pudding(folder, seed):
    """Sets and classifier of a base model without adapters, as `buddy train` leaves them."""
    model = BuddyForCausalLM(tiny_model(), learned=random_pudding(seed=seed), policy="pudding")
    model.save_pretrained(folder, include_backbone=True, tokenizer=word_tokenizer())


@pytest.fixture
def recipe(tmp_path):
    save_pudding(tmp_path / "pudding", 3)
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'model = {{ name = "{tmp_path / "pudding"}", dtype = "float32" }}\n'
        f'data = {{ max_tokens = 40, train = [{{ path = "{rows}" }}] }}\n'
        'lora = { rank = 2, keep_context = true }\nrouter.policy = "pudding"\n'
        'budget.choices = ["4 blocks", "3 blocks"]\n'
        "optim = { steps = 6, batch_size = 4, learning_rate = 1e-2, warmup_steps = 0 }\n"
        "log = { save_every = 3, evaluate_every = 0, tensorboard = false }\n"
    )
    return path


def test_adapters_are_trained_under_the_sets_and_the_choice_stays(recipe, tmp_path):
    before = BuddyForCausalLM.from_pretrained(tmp_path / "pudding")
    checkpoint = train(read_recipe(Recipe, recipe), tmp_path / "out")
    tuned = BuddyForCausalLM.from_pretrained(checkpoint)
    assert isinstance(tuned.policy, PuddingPolicy)
    for name, weight in before.learned.state_dict().items():
        assert torch.equal(tuned.learned.state_dict()[name], weight)
    ids = random_ids(8, 7)
    with torch.no_grad():
        plans = [model(ids, budget="4 blocks") for model in (before, tuned)]
        whole = [model(ids, budget="6 blocks").logits for model in (before, tuned)]
    assert plans[0].plan.executed_sets == plans[1].plan.executed_sets
    assert len(set(plans[0].plan.executed_sets)) > 1
    assert not torch.allclose(whole[0], whole[1], atol=1e-3), "nothing was trained"


def test_a_run_under_another_classifier_is_refused(recipe, tmp_path):
    train(read_recipe(Recipe, recipe, ["optim.steps=3"]), tmp_path / "out")
    save_pudding(tmp_path / "pudding", 4)
    (tmp_path / "out" / "record.json").unlink()
    with pytest.raises(TrainingError, match=r"another run, with other learned"):
        train(read_recipe(Recipe, recipe, ["optim.steps=3"]), tmp_path / "out", resume=True)
    assert json.loads((tmp_path / "out" / "checkpoint" / "buddy.json").read_text())["learned"]
