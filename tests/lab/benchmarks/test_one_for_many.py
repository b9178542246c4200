"""What `benchmarks/one_for_many.py` and `tuned_routes.py` train, and what they compare."""

import argparse
import runpy
from pathlib import Path

import pytest

from buddy.settings import read_recipe
from buddy.training.router.budgets import budget_range, draw_step
from buddy.training.router.recipe import Recipe
from tests.tiny import NUM_BLOCKS, tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    return lambda name: runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"))


@pytest.fixture
def jobs(script, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    asked = argparse.Namespace(
        recipe=ROOT / "recipes" / "one-for-many.toml",
        set=[f"model.name={tmp_path / 'base'}", "optim.steps=50"],
        seeds=[0, 1],
        only=None,
        depths=[5, 4],
        runs=tmp_path,
    )
    return list(script("one_for_many")["planned"](asked))


def test_arms_differ_and_pass_as_many_examples_over_the_blocks(jobs):
    recipe = ROOT / "recipes" / "one-for-many.toml"
    recipes = [read_recipe(Recipe, recipe, job.sets) for job in jobs]
    assert all(one != other for at, one in enumerate(recipes) for other in recipes[:at])
    assert len({job.folder for job in jobs}) == len(jobs) == 2 * (2 + 9 + 2)
    assert {one.optim.batch_size * one.budget.each for one in recipes} == {8}
    steps = [one.optim.steps for one in recipes]
    assert steps == 2 * [*[50] * 10, *[3 * 50] * 3]  # the last have as many at each of three depths
    assert [one.optim.seed for one in recipes] == [0] * 13 + [1] * 13
    pairs = zip(jobs, recipes, strict=True)
    drawn = {job.arm: budget_range(one.budget, NUM_BLOCKS) for job, one in pairs}
    assert drawn["these depths"] == (5, 4, 6)
    assert drawn["low depths"].count(3) == 3 * drawn["low depths"].count(6)
    assert [budget_range(one.budget, NUM_BLOCKS) for one in recipes[:2]] == [(5,), (4,)]


def test_the_work_is_that_of_the_budgets_that_steps_draw(jobs):
    recipe = ROOT / "recipes" / "one-for-many.toml"
    for job in jobs[:13]:
        one = read_recipe(Recipe, recipe, job.sets)
        budgets = budget_range(one.budget, NUM_BLOCKS)
        drawn = sum(
            sum(draw_step(one, budgets, one.optim.batch_size, step, step).budgets)
            for step in range(400)
        )
        taught = one.optim.batch_size * NUM_BLOCKS / 3 if one.teacher.name else 0
        assert job.work / one.optim.steps == pytest.approx(drawn / 400 + taught, rel=0.03), job.arm


def run_of(*nats):
    rows = len(nats)
    return {
        "nats": [[value] for value in nats],
        "tokens": [1, 1, 2][:rows],
        "plans": [["0 1"]] * rows,
        "sources": ["one", "one", "two"][:rows],
        "step_ms": 3.0,
    }


def test_an_arm_is_behind_the_model_of_the_same_depth_row_by_row(script):
    made = script("one_for_many")
    found = {
        (made["ONE"], 18): [run_of(1, 3, 4), run_of(3, 3, 4)],
        ("uniform", 18): [run_of(2, 3, 6), run_of(4, 3, 6)],
        ("uniform", 30): [run_of(1, 1, 1)],
    }
    found[made["ONE_LONGER"], 18] = found[made["ONE"], 18]
    points = [made["compared"](found, *key) for key in found]
    assert points[1]["behind_one_longer"] == points[1]["behind_one"]
    behind = points[1]["behind_one"]
    assert behind["nats"] == pytest.approx(3 / 4)
    assert behind["by_seed"] == pytest.approx([3 / 4, 3 / 4])
    assert not any("behind_one" in points[at] for at in (0, 2))
    assert "| uniform | 0.750 | 3.000 +0.750 ± 0.286 |" in made["table"](points)


def test_what_routing_gains_is_told_by_kind(script):
    made = script("tuned_routes")
    found = {"one order": [run_of(2, 3, 6)], "routed": [run_of(1, 3, 5)]}
    points = list(made["compared"](found, [22]))
    gains = {point["kind"]: point["gain"]["nats"] for point in points}
    assert gains == pytest.approx({"all": 2 / 4, "one": 1 / 2, "two": 1 / 2})
    assert "| all | +0.500 ± " in made["table"](points)


def test_both_arms_of_tuned_routes_are_recipes(script):
    arms = script("tuned_routes")["ARMS"]
    recipe = ROOT / "recipes" / "tuned-routes.toml"
    routed, order = (read_recipe(Recipe, recipe, arms[arm]) for arm in ("routed", "one order"))
    assert routed.optim.router_learning_rate == 0
    assert (routed.router.policy, order.router.policy) == ("routed", "static")
    assert routed.lora == order.lora
    assert routed.budget == order.budget
