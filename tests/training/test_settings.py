from dataclasses import dataclass, field
from typing import Literal

import pytest

from buddy.errors import RecipeError
from buddy.training.joint.recipe import Recipe
from buddy.training.settings import read_recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    steps: int
    name: str | None = None
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('steps = 3\nname = "x"\n[inner]\nrate = 1\n[[many]]\nkind = "b"\n')
    return path


def test_tables_become_dataclasses(recipe):
    assert read_recipe(Outer, recipe) == Outer(
        steps=3, name="x", inner=Inner(rate=1.0), many=(Inner(kind="b"),)
    )


def test_set_changes_one_key_and_takes_plain_words(recipe):
    changed = read_recipe(Outer, recipe, ["inner.rate=2e-3", "inner.kind=b", "steps=4"])
    assert changed.inner == Inner(rate=0.002, kind="b")
    assert (changed.steps, changed.name) == (4, "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("inner.rat=1", "unknown key rat: expected rate, kind"),
        ("step=1", "unknown key step: expected steps, name, inner, many"),
        ("steps=1.5", "steps: expected int, got 1.5"),
        ("steps=true", "steps: expected int, got True"),
        ("inner.kind=c", "kind: expected one of a, b, got 'c'"),
        ("inner=3", "inner: expected a table"),
        ("many=3", "many: expected a list"),
        ("steps", "--set takes KEY=VALUE"),
        ("steps.more=3", "steps is no table"),
    ],
)
def test_a_typo_is_an_error_that_says_what_is_valid(recipe, change, says):
    with pytest.raises(RecipeError, match=says):
        read_recipe(Outer, recipe, [change])


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(Outer, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(RecipeError, match="is no TOML"):
        read_recipe(Outer, tmp_path / "bad.toml")
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(RecipeError, match="lacks steps"):
        read_recipe(Outer, tmp_path / "empty.toml")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("router.omega=1\nrouter.dense_share=1.5", "dense_share must be between 0 and 1"),
        ('router.method="policy-gradient"\nrouter.samples=1', "samples must be at least 2"),
        ("optim.batch_size=0", "batch_size and steps must be at least 1"),
        ('lora.rank=0\nrouter.policy="static"', "nothing to train"),
        ('data.train=[{path="x", hub="y"}]', "either path"),
        ('router.planner.context="keys"', "expected one of key, value"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, setting, says):
    path = tmp_path / "recipe.toml"
    path.write_text('[data]\ntrain = [{ path = "rows.jsonl" }]\n')
    with pytest.raises(RecipeError, match=says):
        read_recipe(Recipe, path, setting.split("\n"))
