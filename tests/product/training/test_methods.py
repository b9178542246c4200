"""A recipe names its method; the table of methods says what it is read as and what runs it."""

from inspect import signature
from pathlib import Path

import pytest

from buddy.errors import RecipeError
from buddy.training.ledger.recipe import LedgerRecipe
from buddy.training.methods import read_method, trained_methods
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.router.recipe import Recipe
from buddy.training.router.run import train

ROOT = Path(__file__).parents[3]
SMALL = '[data]\ntrain = [{ path = "rows.jsonl" }]\n'


def read(path, text, *changes):
    path.write_text(text)
    return read_method(path, changes)


@pytest.mark.parametrize("first", ["", 'method = "buddy"\n'])
def test_a_recipe_without_a_method_is_one_of_buddy(tmp_path, first):
    method, recipe = read(tmp_path / "recipe.toml", first + SMALL, "optim.steps=7")
    assert (method.name, type(recipe), recipe.optim.steps) == ("buddy", Recipe, 7)
    assert method.load("train") is train


@pytest.mark.parametrize("name", trained_methods())
def test_every_method_is_told_from_a_recipe_and_can_be_run(tmp_path, name):
    with pytest.raises(RecipeError, match=r"unknown key no_such_key: expected .*data"):
        read(tmp_path / "recipe.toml", "no_such_key = 1\n", f"method={name}")
    train = trained_methods()[name].load("train")
    parameters = list(signature(train).parameters.values())
    assert [each.name for each in parameters[:4]] == ["recipe", "out", "resume", "listener"]
    assert all(each.default is None for each in parameters[4:])


@pytest.mark.parametrize("value", ['"dense"', "3", "['buddy']", "{ a = 1 }"])
def test_a_method_that_is_none_is_refused_in_one_line(tmp_path, value):
    with pytest.raises(RecipeError, match=r"method: expected one of .*buddy.*, got") as refused:
        read(tmp_path / "recipe.toml", f"method = {value}\n{SMALL}")
    assert "\n" not in str(refused.value)


def test_an_unknown_key_of_the_method_is_refused_by_its_file(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe\.toml has an unknown key steps"):
        read(tmp_path / "recipe.toml", f"steps = 3\n{SMALL}")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda one: one.name
)
def test_every_recipe_of_ours_can_be_read(path):
    method, recipe = read_method(path)
    kinds = {"budget": ("predictor", BudgetRecipe), "ledger": ("ledger", LedgerRecipe)}
    name, kind = kinds.get(path.stem.rpartition("-")[2], (None, None))
    if name is None:
        assert method.name == "buddy" or path.stem == method.name
    else:
        assert (method.name, type(recipe)) == (name, kind)
        assert read_method(path, stage=name) == (method, recipe)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "buddy"),
        ("[grpo]\nsamples = 2\n", "predictor"),
        ("[measure]\nprecompute = false\n", "predictor"),
        ("[predictor]\nrank = 2\n", "predictor"),
        ("[ledger]\nlevels = [2, 4]\n", "ledger"),
    ],
)
def test_a_table_that_one_stage_alone_has_tells_the_stage(tmp_path, text, name):
    model = '[model]\nname = "x"\n'
    assert read(tmp_path / "recipe.toml", model + SMALL + text)[0].name == name
    named = f'method = "{name}"\n' + model + SMALL + text
    assert read(tmp_path / "recipe.toml", named)[0].name == name


def test_a_recipe_of_another_stage_than_its_command_is_refused(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f'method = "pudding"\n{SMALL}')
    with pytest.raises(RecipeError, match="method: expected predictor, got 'pudding': buddy train"):
        read_method(path, stage="predictor")
    path.write_text(SMALL)  # as a recipe of stage 2 that names its checkpoint alone
    method, recipe = read_method(path, ["model.name=x"], "predictor")
    assert (method.name, recipe.model.name) == ("predictor", "x")
