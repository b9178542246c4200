"""Recipes that nobody should write: each is refused in one line, before anything is made."""

import dataclasses
import json
import os
import typing
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buddy.data.examples import Source
from buddy.errors import BuddyError, BudgetError, RecipeError, TrainingError
from buddy.importance.search.bounded import Pruning
from buddy.lab.evaluation.rouge.rouge import RougeConfig
from buddy.lab.evaluation.speed.speed import SpeedConfig
from buddy.methods.pudding.recipe import PuddingRecipe
from buddy.settings import Range, build, read_recipe
from buddy.training.log import TrainingLog
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.run import train_budget
from buddy.training.recipe import DataSettings
from buddy.training.router.recipe import OptimSettings, Recipe
from buddy.training.router.run import train
from tests.product.training.made import save_stage_1, write_rows
from tests.tiny import tiny_model
from tests.words import word_tokenizer

SMALL = '[data]\ntrain = [{ path = "rows.jsonl" }]\n[model]\nname = "model"\n'


def read(kind, path, *changes, text=SMALL):
    path.write_text(text)
    return read_recipe(kind, path, changes)


def walk(kind):
    """A dataclass of settings, and all that its fields are made of."""
    found = {kind: None}
    for hint in typing.get_type_hints(kind).values():
        for one in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(one):
                found |= dict.fromkeys(walk(one))
    return list(found)


SETTINGS = dict.fromkeys(
    one
    for kind in (
        Recipe,
        BudgetRecipe,
        PuddingRecipe,
        Source,
        SpeedConfig,
        RougeConfig,
        Pruning,
    )
    for one in walk(kind)
)


def numeric_fields(kind):
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        parts = [hint, *typing.get_args(hint)]
        if any(typing.get_origin(part) is typing.Literal for part in parts):
            continue  # words, or a number of steps: `check_reroute` reads both
        plain = {one for part in parts for one in (part, *typing.get_args(part)[:1])}
        for number in plain & {int, float}:
            extras = [one for part in parts for one in getattr(part, "__metadata__", ())]
            yield name, number(-1000), extras


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_number_of_the_settings_has_a_range_that_is_checked(kind):
    fields = list(numeric_fields(kind))
    needed = {"train": ()} if kind is DataSettings else {}
    for name, far, extras in fields:
        # A decay has two open ends, which a Range has not; it is checked by hand.
        assert name == "ema_decay" or [one for one in extras if isinstance(one, Range)], (
            f"{kind.__name__}.{name}"
        )
        with pytest.raises(BuddyError, match=r"must be .* got -1000"):
            kind(**{**needed, name: far})


def test_the_walk_finds_all_settings_and_their_numbers():
    assert {"OptimSettings", "LoraSettings", "Source", "GRPOSettings", "PlannerConfig"} <= {
        kind.__name__ for kind in SETTINGS
    }
    assert "steps" in [name for name, *_ in numeric_fields(OptimSettings)]  # a number or None


OUT_OF_RANGE = [
    ("lora.rank=-2", "lora: rank must be at least 0 and at most 4,096, got -2"),
    ("lora.rank=100000000", "rank must be at least 0 and at most 4,096, got 100000000"),
    ("lora.dropout=2.0", "dropout must be at least 0 and at most 0.99, got 2.0"),
    ("lora.dropout=-0.1", "dropout must be at least 0"),
    ("lora.alpha=0.0", "alpha must be above 0"),
    ("lora.alpha=1e300", "alpha must be above 0 and at most 1e.06, got 1e.300"),
    ("router.rank=0", "rank must be at least 1"),
    ("router.omega=nan", "omega must be at least 0 and at most 1,000, got nan"),
    ("router.temperature=nan", "temperature must be at least 0.0001 and at most 10000, got nan"),
    ("router.temperature=1e-300", "temperature must be at least 0.0001"),
    ("router.spread=-1", "spread must be at least 0"),
    ("router.samples=1000000", "samples must be at least 1 and at most 64"),
    ("router.coefficient=inf", "coefficient must be at least 0 and at most 1,000, got inf"),
    ("router.second_route=1.5", "second_route must be at least 0 and at most 1, got 1.5"),
    ("budget.stretch=0", "stretch must be at least 1"),
    ("budget.full_prompts=nan", "full_prompts must be at least 0"),
    ("optim.learning_rate=nan", "learning_rate must be above 0 and at most 1, got nan"),
    ("optim.learning_rate=0", "learning_rate must be above 0"),
    ("optim.router_learning_rate=-1", "router_learning_rate must be at least 0"),
    ("optim.seed=10000000000000000000", "seed must be at least 0 and at most 4,294,967,295"),
    ("optim.seed=-1", "seed must be at least 0"),
    ("optim.weight_decay=nan", "weight_decay must be at least 0 and at most 100, got nan"),
    ("optim.max_grad_norm=0", "max_grad_norm must be above 0"),
    ("optim.warmup_steps=-5", "warmup_steps must be at least 0"),
    ("optim.batch_size=1000000000", "batch_size must be at least 1 and at most 4,096"),
    ("optim.epochs=inf", "epochs must be above 0"),
    ("optim.steps=0", "steps must be at least 1"),
    ("log.every=0", "every must be at least 1"),
    ("log.save_every=0", "save_every must be at least 1"),
    ("log.evaluate_every=-1", "evaluate_every must be at least 0"),
    ("log.evaluate_rows=0", "evaluate_rows must be at least 1"),
    ("data.max_tokens=1", "max_tokens must be at least 2"),
    ("data.train=[{path='x', stop=-1}]", "stop must be at least 1"),
    ("data.train=[{path='x', start=5, stop=5}]", "stop must be above start, 5, got 5"),
    ("data.train=[{path='x', repeat=1000000000}]", "repeat must be at least 1 and at most 1,000"),
    ("data.train=[]", "train has no source"),
    ("router.planner.context_layer=0", "context_layer must be"),
]
BUDGETS = [
    ("budget.low=much", "budget 'much' cannot be read"),
    ("budget.low='nan'", "budget 'nan' cannot be read"),
    ("budget.high='inf'", "budget 'inf' cannot be read"),
    ("budget.high='150%'", "budget 1.5 is not allowed"),
    ("budget.choices=['0 blocks']", "choices: blocks must be at least 1, got '0 blocks'"),
    ("budget.choices=['auto']", "auto is for inference"),
    ("budget.choices=[0.5]", "expected str, got 0.5"),
    ("log.evaluate_budgets=[]", "evaluate_budgets has no budget"),
    ("log.evaluate_budgets=['x']", "budget 'x' cannot be read"),
]
VALUES = [
    ("optim=3", "optim: expected a table, got 3"),
    ("a.b.c=3", "unknown key a: expected data, model"),
    ("=", "--set takes KEY=VALUE"),
    ("=3", "--set takes KEY=VALUE"),
    ("optim..steps=3", "--set takes KEY=VALUE"),
    ("optim.=3", "--set takes KEY=VALUE"),
    ("optim.steps", "--set takes KEY=VALUE"),
    ("optim.steps=1\ny=2", "--set takes one KEY=VALUE"),
    ("data.train.path=x", "train is no table"),
    ("optim.steps=" + "9" * 5000, "steps: expected int, got '9999"),
    ("optim.steps=0x" + "f" * 5000, "steps must be at least 1 .* got a very long int"),
    ("optim.learning_rate=0x" + "f" * 5000, "expected float, got a very long int"),
    ("optim.steps=inf", "expected int, got inf"),
    ("optim.steps=2020-01-01", "expected int, got datetime.date"),
    ("model.name=2020-01-01", "expected str, got datetime.date"),
    ("optim.steps=" + "[" * 100_000, "nests too deeply"),
    ("optim.steps" + ".a" * 5000 + "=1", "expected int, got a very long dict"),
    ("b" * 5000 + "=1", "unknown key bbb"),
    ("model.name=\udcff", "expected a text of Unicode without NUL"),
    ('model.name="a\\u0000b"', "expected a text of Unicode without NUL"),
    ("model.name=true", "expected str, got True"),
]


@pytest.mark.parametrize(("change", "says"), [*OUT_OF_RANGE, *BUDGETS, *VALUES])
def test_a_value_that_cannot_be_is_refused_in_one_short_line(tmp_path, change, says):
    with pytest.raises(RecipeError, match=says) as caught:
        read(Recipe, tmp_path / "recipe.toml", change)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("optim.seed=10000000000000000000", "seed must be at least 0"),
        ("optim.learning_rate=nan", "learning_rate must be above 0"),
        ("optim.weight_decay=-1", "weight_decay must be at least 0"),
        ("grpo.samples=1", "samples must be at least 2"),
        ("grpo.epsilon=0", "epsilon must be at least 1e-12"),
        ("grpo.lambda_cost=inf", "lambda_cost must be at least 0"),
        ("measure.batch_size=0", "batch_size must be at least 1"),
        ("log.every=0", "every must be at least 1"),
        ("log.evaluate_every=-1", "evaluate_every must be at least 0"),
        ("predictor.rank=0", "rank must be at least 1"),
    ],
)
def test_and_so_is_one_of_stage_2(tmp_path, change, says):
    with pytest.raises(RecipeError, match=says):
        read(BudgetRecipe, tmp_path / "recipe.toml", change)


def test_the_last_of_two_changes_holds_and_a_key_stands_once_in_a_file(tmp_path):
    path = tmp_path / "recipe.toml"
    assert read(Recipe, path, "optim.steps=3", "optim.steps=4").optim.steps == 4
    with pytest.raises(RecipeError, match="is no TOML"):
        read(Recipe, path, text=f"{SMALL}[optim]\nsteps = 3\nsteps = 4\n")
    with pytest.raises(RecipeError, match="optim is no table"):
        read(Recipe, path, "optim=3", "optim.steps=4")


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path):
    assert read(Recipe, tmp_path / "recipe.toml", text=f"\ufeff{SMALL}").model.name == "model"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe", "is no UTF-8 text"),
        (b"x = " + b"[" * 100_000, "nests too deeply|is no TOML"),
        (b"x = " + b"9" * 5000, "is no TOML"),
        (b"x = 1\n" * 200_000, r"has 1,200,000 bytes: at most 1,048,576 are read"),
        (b"\x00", "is no TOML"),
    ],
)
def test_files_that_are_no_recipe_are_refused(tmp_path, content, says):
    (tmp_path / "recipe.toml").write_bytes(content)
    with pytest.raises(RecipeError, match=says):
        read_recipe(Recipe, tmp_path / "recipe.toml")


def test_a_folder_a_pipe_and_a_device_are_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(RecipeError, match="expected a regular file"):
            read_recipe(Recipe, path)
    for path in (tmp_path / "none", Path("a\0b"), Path("~no-such-user/x"), Path("x" * 5000)):
        with pytest.raises(RecipeError, match="cannot be read"):
            read_recipe(Recipe, path)


_PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([{}])
_KEYS = st.sampled_from(
    [field.name for kind in SETTINGS for field in dataclasses.fields(kind)] + ["x"]
)
_TABLES = st.recursive(
    _PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(_TABLES)
def test_of_any_tables_only_a_recipe_or_our_error_comes(values):
    for kind in (Recipe, BudgetRecipe):
        with suppress(RecipeError):
            build(kind, values if isinstance(values, dict) else {"data": values}, "here")


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text(), st.binary())
def test_of_any_change_and_any_file_only_our_error_comes(tmp_path_factory, key, value, content):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    for change in (key, f"{key}={value}", f"optim.{key}={value}", f"optim.steps={value}"):
        with suppress(RecipeError):
            read(Recipe, path, change)
    path.write_bytes(content)
    with suppress(RecipeError):
        read_recipe(Recipe, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model of 6 blocks, hidden size 32 and a context of 64, and rows for it."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    word_tokenizer().save_pretrained(path)
    write_rows(path / "rows.jsonl", 12)
    save_stage_1(path / "stage1")
    return path


def recipe_of(folder, tmp_path, *changes, kind=Recipe):
    rows = f"data.train=[{{path='{folder / 'rows.jsonl'}'}}]"
    name = folder if kind is Recipe else folder / "stage1"
    sets = [f"model.name='{name}'", "model.dtype=float32", rows, "data.max_tokens=60"]
    if kind is Recipe:
        sets.append("router.prior=none")
    return read(kind, tmp_path / "recipe.toml", *sets, *changes, text="")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("lora.rank=33", "lora.rank must be at most 32, the model's hidden size, got 33"),
        ("data.max_tokens=65", "data.max_tokens must be at most 64, the model's context, got 65"),
        ("budget.low='2 blocks'", "expected 3 to 6 blocks"),
        ("budget.choices=['7 blocks']", "expected 3 to 6 blocks"),
        ("budget.low='5 blocks'\nbudget.high='0.5'", "is above budget.high"),
        ("log.evaluate_budgets=['0.1']", "rounds to 1"),
        ("optim.batch_size=13", "12 training rows do not fill one batch of 13"),
        ("router.prior=none.json", "none.json cannot be read"),
        ("router.orders=[{sources=['a'], record='none.json'}]", "none.json cannot be read"),
        ("lora.start=nowhere", "nowhere/buddy.json"),
        ("teacher.name=nowhere/none", "nowhere/none"),
        ("data.validation=[{path='none.jsonl'}]", "none.jsonl cannot be read"),
        ("data.train=[{path='/dev/zero'}]", "expected a regular file"),
        ("router.planner.context_layer=4\nbudget.low='3 blocks'", "5 of the 6 blocks always run"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_and_leaves_no_folder(
    folder, tmp_path, change, says
):
    recipe = recipe_of(folder, tmp_path, *change.split("\n"))
    with pytest.raises(BuddyError, match=says):
        train(recipe, tmp_path / "runs" / "out")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("data.max_tokens=65", "data.max_tokens must be at most 64, the model's context"),
        ("optim.batch_size=13", "12 training rows do not fill one batch of 13"),
        ("data.validation=[{path='none.jsonl'}]", "none.jsonl cannot be read"),
    ],
)
def test_stage_2_leaves_none_either(folder, tmp_path, change, says):
    recipe = recipe_of(folder, tmp_path, change, kind=BudgetRecipe)
    with pytest.raises(BuddyError, match=says):
        train_budget(recipe, tmp_path / "runs" / "out")
    assert not (tmp_path / "runs").exists()


def test_what_needs_no_model_is_refused_before_one_is_looked_for(folder, tmp_path):
    for change in ("data.train=[{path='none.jsonl'}]", "lora.start=none.jsonl"):
        recipe = recipe_of(folder, tmp_path, "model.name=no/such-model", change)
        with pytest.raises(BuddyError, match=r"none\.jsonl"):
            train(recipe, tmp_path / "out")


@pytest.mark.parametrize("stage", [train, train_budget])
def test_a_folder_that_no_run_can_have_is_refused_before_a_model_is_looked_for(
    folder, tmp_path, stage, monkeypatch
):
    kind = Recipe if stage is train else BudgetRecipe
    recipe = recipe_of(folder, tmp_path, "model.name=no/such-model", kind=kind)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken/checkpoint").mkdir(parents=True)
    (tmp_path / "taken/checkpoint/mine").write_text("mine")
    for out, says in (
        ("file", "file is no folder; name another --out"),
        ("file/out", "file is no folder"),
        ("x" * 300, "File name too long"),
        ("taken", "checkpoint holds what is no Buddy checkpoint"),
    ):
        with pytest.raises(TrainingError, match=says):
            stage(recipe, tmp_path / out)
    (tmp_path / "locked").mkdir()
    # A test that runs as root may write anywhere: what the system would say is said for it.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "locked")
    with pytest.raises(TrainingError, match="locked cannot be written to"):
        stage(recipe, tmp_path / "locked/out")


def test_a_run_with_another_recipe_says_what_differs(folder, tmp_path):
    short = ["optim.steps=1", "log.tensorboard=false"]
    train(recipe_of(folder, tmp_path, *short), tmp_path / "out")
    other = recipe_of(folder, tmp_path, *short, "optim.seed=4294967295")
    with pytest.raises(TrainingError, match=r"optim\.seed \(was 0, is 4294967295\)"):
        train(other, tmp_path / "out", resume=True)
    record = json.loads((tmp_path / "out/record.json").read_text())
    assert record["results"]["left_out"] == []
    train(other, tmp_path / "largest seed")


@pytest.mark.parametrize("line", [b"\xff", b"{", b"[]", b'{"step": "2"}', b'{"kind": 1}'])
def test_a_damaged_log_is_refused_but_for_its_last_line(tmp_path, line):
    good = b'{"step": 1, "kind": "train"}\n'
    (tmp_path / "log.jsonl").write_bytes(good + line + b"\n" + good)
    with pytest.raises(TrainingError, match=r"log\.jsonl") as caught:
        TrainingLog(tmp_path, 1, tensorboard=False)
    assert "\n" not in str(caught.value)
    if line == b"{":
        (tmp_path / "log.jsonl").write_bytes(good + line)
        TrainingLog(tmp_path, 1, tensorboard=False).close()
        assert (tmp_path / "log.jsonl").read_bytes() == good


def test_a_budget_that_only_the_model_can_judge_is_a_budget_error(folder, tmp_path):
    recipe = recipe_of(folder, tmp_path, "budget.choices=['7 blocks']")
    with pytest.raises(BudgetError, match="7 blocks"):
        train(recipe, tmp_path / "out")
