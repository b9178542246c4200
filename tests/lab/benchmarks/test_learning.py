"""The factorial of `benchmarks/learning.py`: its arms, its controls and its gains."""

import runpy
from pathlib import Path

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.records import read_record
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe
from tests.product.training.examples import random_examples
from tests.product.training.made import write_rows
from tests.tiny import NUM_BLOCKS, tiny_buddy
from tests.words import word_tokenizer

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "learning.toml"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as `python benchmarks/NAME.py` does
    return runpy.run_path(str(ROOT / "benchmarks" / "learning.py"))


def test_every_arm_is_a_recipe_and_differs_from_every_other(script):
    recipes = [read_recipe(Recipe, RECIPE, sets) for sets in script["ARMS"].values()]
    assert all(one != other for at, one in enumerate(recipes) for other in recipes[:at])
    assert recipes[0].optim.router_learning_rate == 0
    assert all(recipe.optim.steps == recipes[0].optim.steps for recipe in recipes)


def test_the_order_of_a_router_is_that_of_its_mean_scores_and_runs_as_it_says(script, tmp_path):
    model = tiny_buddy()
    model.save_pretrained(tmp_path / "checkpoint", tokenizer=word_tokenizer())
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    sets = [f"model.name={tmp_path / 'checkpoint'}", f'data.train=[{{path="{rows}"}}]']
    recipe = read_recipe(Recipe, RECIPE, [*sets, "data.max_tokens=40"])
    script["save_order"](tmp_path / "checkpoint", recipe, tmp_path / "order.json")
    order = read_record(tmp_path / "order.json")["results"]["removal_order"]
    assert sorted(order) == [1, 2, 3, 4]
    with torch.no_grad():  # biases alone decide where they are large
        model.router.decision.up.bias.copy_(100 * torch.tensor([2.0, 0.0, 3.0, 1.0]))
    model.save_pretrained(tmp_path / "checkpoint", tokenizer=word_tokenizer())
    script["save_order"](tmp_path / "checkpoint", recipe, tmp_path / "order.json")
    assert read_record(tmp_path / "order.json")["results"]["removal_order"] == [2, 4, 1, 3]
    examples = random_examples(5)
    routed = script["measure"](tmp_path / "checkpoint", examples, [4, 6], None)
    held = script["measure"](tmp_path / "checkpoint", examples, [4, 6], [2, 4, 1, 3])
    assert {row[0] for row in held["plans"]} == {"0 1 3 5"}
    assert routed == held
    loaded = BuddyForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.bfloat16)
    for example, nats in zip(examples, routed["nats"], strict=True):
        ids = torch.tensor([example.prompt + example.answer])
        with torch.no_grad():
            log_probs = loaded(ids, budget=f"{NUM_BLOCKS} blocks").logits[0].log_softmax(1)
        begin = len(example.prompt) - 1
        lost = -log_probs[begin:-1].gather(1, ids[0, begin + 1 :, None]).sum()
        assert nats[1] == pytest.approx(float(lost), rel=2e-2)  # bfloat16, rounded elsewhere


def run_of(*nats):
    return {
        "nats": [[value] for value in nats],
        "tokens": [1, 1, 2],
        "plans": [["0 1"], ["0 1"], ["0 2"]],
        "step_ms": 3.0,
    }


def test_gains_are_paired_by_row_over_the_mean_of_seeds(script):
    prior = script["PRIOR"], "trained"
    found = {
        prior: [run_of(2, 3, 6), run_of(4, 3, 6)],
        ("measured", "trained"): [run_of(1, 3, 4), run_of(3, 3, 4)],
        ("measured", "frozen"): [run_of(1, 3, 5), run_of(3, 3, 5)],
    }
    (point,) = script["compared"](found, "measured", "trained", [22])
    assert point["nats"] == pytest.approx((2 + 3 + 4) / 4)
    assert point["distinct_plans"] == [2, 2]
    gain = point["gain_over_prior"]
    assert gain["nats"] == pytest.approx((1 + 0 + 2) / 4)
    assert gain["by_seed"] == pytest.approx([3 / 4, 3 / 4])
    assert gain["by_answer"]["nats"] == pytest.approx((1 + 0 + 2 / 2) / 3)
    # What is left of 1, 0, 2 after 3/4 a token: squares of 1/4, 3/4 and 1/2, times 3 / 2.
    assert gain["error"] == pytest.approx(((1 / 16 + 9 / 16 + 1 / 4) * 3 / 2) ** 0.5 / 4)
    assert point["gain_over_frozen"]["nats"] == pytest.approx(1 / 4)
    assert "gain_over_order" not in point
    (point,) = script["compared"](found, *prior, [22])
    assert not any(name.startswith("gain") for name in point)
    points = list(script["compared"](found, "measured", "trained", [22]))
    assert "| measured | trained | 2.250 +0.750 ± 0.286 |" in script["table"](points, "prior")
    assert "| measured | trained | 2.250 +0.250 ± " in script["table"](points, "frozen")
