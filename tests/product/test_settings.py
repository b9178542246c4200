from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from buddy.errors import CheckpointError, RecipeError
from buddy.settings import SEED, Range, Size, build, check_ranges, read_recipe
from buddy.training.router.recipe import Recipe


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
        ("router.omega=1\nrouter.dense_share=1.5", "dense_share must be at least 0 and at most 1"),
        ('router.method="policy-gradient"\nrouter.samples=1', "samples must be at least 2"),
        (
            'router.method="policy-gradient"\nrouter.second_route=0.5',
            "set router.second_route to 0",
        ),
        ('router.relaxation="skipped-softmax"', "dense_share is 0, so that these get no gradient"),
        ('router.method="measured"\nrouter.samples=1', "measured compares plans: samples must be"),
        ('router.method="measured"\nbudget.full_prompts=0.5', "set budget.full_prompts to 0"),
        ('router.method="measured"\nrouter.policy="random"', "method measured is of a router"),
        ('router.method="measured"\nrouter.relaxation="sigmoid"', "has none: leave it out, got"),
        ('router.method="measured"\noptim.fsdp=true', "optim.fsdp gathers the blocks"),
        ('router.method="measured"\nrouter.dense_share=1', "dense_share is of gates.*got 1"),
        ('router.method="policy-gradient"\nrouter.dense_share=1', "dense_share is of gates"),
        (
            'router.spread=0.5\nrouter.planner.pool="scores"',
            "spread is of a router that pools tokens",
        ),
        ("optim.batch_size=0", "batch_size must be at least 1 and at most 4,096, got 0"),
        ('lora.rank=0\nrouter.policy="static"', "nothing to train"),
        ("lora.rank=0\noptim.router_learning_rate=0", "router_learning_rate are 0"),
        ('data.train=[{path="x", hub="y"}]', "either path"),
        ('router.planner.context="keys"', "expected one of key, value"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, setting, says):
    path = tmp_path / "recipe.toml"
    path.write_text('[data]\ntrain = [{ path = "rows.jsonl" }]\n')
    with pytest.raises(RecipeError, match=says):
        read_recipe(Recipe, path, setting.split("\n"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranged:
    rank: Annotated[int, Range(1, 4096)] = 8
    rate: Annotated[float, Range(above=0)] = 1.0
    share: Annotated[float, Range(0, 1)] | None = None
    free: float = 0.0
    seed: Annotated[int, SEED] = 0

    def __post_init__(self) -> None:
        check_ranges(self, RecipeError)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rank": 0}, "rank must be at least 1 and at most 4,096, got 0"),
        ({"rank": 10**8}, "rank must be at least 1 and at most 4,096, got 100000000"),
        ({"rate": 0.0}, "rate must be above 0, got 0"),
        ({"rate": float("nan")}, "rate must be above 0, got nan"),
        ({"share": 1.5}, "share must be at least 0 and at most 1, got 1.5"),
        ({"free": float("inf")}, "free must be finite, got inf"),
        ({"seed": 10**19}, "seed must be at least 0"),
    ],
)
def test_a_number_outside_its_range_is_refused_from_python_and_from_a_file(values, says):
    with pytest.raises(RecipeError, match=says):
        Ranged(**values)
    with pytest.raises(RecipeError, match=f"^here: {says}"):
        build(Ranged, values, "here")


def test_numbers_at_the_ends_of_a_range_are_taken():
    made = build(Ranged, {"rank": 4096, "share": 1, "seed": 2**63 - 1}, "here")
    assert made == Ranged(rank=4096, share=1.0, seed=2**63 - 1)


def test_the_error_is_of_the_kind_that_the_reader_asks_for():
    with pytest.raises(CheckpointError, match="rank: expected int, got 'x'"):
        build(Ranged, {"rank": "x"}, "here", CheckpointError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    label: Annotated[str, Size(1)]
    rates: Annotated[tuple[Annotated[float, Range(0, 1)], ...], Size(1, 3)] | None = None
    inner: Inner | None = None

    def __post_init__(self) -> None:
        check_ranges(self, RecipeError)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"label": ""}, "label must be at least 1 long, got ''"),
        ({"rates": []}, "rates must be at least 1 and at most 3 long"),
        ({"rates": [0.0] * 4}, "rates must be at least 1 and at most 3 long"),
        ({"rates": [0.5, 2]}, r"rates\[1\] must be at least 0 and at most 1, got 2"),
        ({"rates": [0.5, float("nan")]}, r"rates\[1\] must be at least 0 and at most 1, got nan"),
        ({"rates": [0.5, "1"]}, r"rates\[1\]: expected float, got '1'"),
    ],
)
def test_lengths_and_the_items_of_a_list_have_ranges(values, says):
    with pytest.raises(RecipeError, match=says):
        build(Lengths, {"label": "a", **values}, "r")


def test_keys_that_are_no_fields_are_passed_over_at_any_depth_if_that_is_asked_for():
    values = {"label": "a", "more": 1, "inner": {"rate": 1, "less": [2]}}
    assert build(Lengths, values, "r", others=True) == Lengths(label="a", inner=Inner(rate=1.0))
    with pytest.raises(RecipeError, match="unknown key more"):
        build(Lengths, values, "r")
