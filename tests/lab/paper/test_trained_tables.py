"""Tables that train or generate: made end to end on a tiny model."""

import json

import pytest

from buddy import BuddyForCausalLM
from buddy.errors import ResultError
from buddy.lab.paper.recipes import to_toml
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe
from tests.lab.paper.made import make, save_model


@pytest.fixture(autouse=True)
def few_rows(monkeypatch, commands_here):
    """The data folder has 40 rows of Alpaca."""
    monkeypatch.setattr("buddy.lab.paper.recipes.HELD_OUT", 8)
    monkeypatch.setattr("buddy.lab.paper.tables.training_cost.HELD_OUT", 8)
    monkeypatch.setattr("buddy.lab.paper.tables.training_cost.STEPS", 2)


def test_a_recipe_that_is_written_is_the_one_that_is_read(tmp_path):
    rows = {"path": 'a "b".jsonl', "start": 3}
    tables = {
        "data": {"max_tokens": 40, "train": [rows, {"path": "c"}]},
        "router": {"omega": 0.3, "planner": {"context": "key+value"}},
        "log": {"evaluate_budgets": ["0.5", "3 blocks"], "tensorboard": False},
    }
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(tables))
    recipe = read_recipe(Recipe, path)
    assert [(item.path, item.start) for item in recipe.data.train] == [('a "b".jsonl', 3), ("c", 0)]
    assert (recipe.router.omega, recipe.router.planner.context) == (0.3, "key+value")
    assert recipe.log.evaluate_budgets == ("0.5", "3 blocks")
    assert not recipe.log.tensorboard


def test_an_ablation_trains_once_and_stands_beside_the_papers(model, data, tmp_path):
    out = tmp_path / "out"
    collected, record, said = make("context", model, data, out, rows=2)
    assert sum(line.startswith("buddy train ") for line in said) == 3
    points = record["results"]["points"]
    assert {(point["setting"], point["blocks"]) for point in points} == {
        (name, blocks) for name in ("key", "value", "key+value") for blocks in (5, 4, 3)
    }
    (sheet,) = collected.sheets
    told = {row[:2]: row[-1] for row in sheet.rows}
    assert told["value", "3"] == "44.78"
    assert len({point["cross_entropy"] for point in points}) > 3
    _, again, said = make("context", model, data, out, rows=2)
    assert said == []
    assert again["results"] == record["results"]
    with pytest.raises(ResultError, match=r"another recipe, with other .*steps \(was 2, is 3\)"):
        make("context", model, data, out, rows=3)


def test_omega_starts_from_taylors_prior(model, data, tmp_path):
    _, record, said = make("omega", model, data, tmp_path / "out", rows=1)
    assert "--indicator taylor" in said[0]
    config = json.loads((tmp_path / "out" / "omega-0.7" / "record.json").read_text())["config"]
    assert config["router"]["omega"] == 0.7
    assert config["router"]["prior"] == str(tmp_path / "out" / "order-taylor.json")
    assert {point["setting"] for point in record["results"]["points"]} == {
        "0.01",
        "0.1",
        "0.3",
        "0.5",
        "0.7",
        "1.0",
    }


def test_training_cost_counts_the_papers_steps(model, data, tmp_path):
    collected, record, _ = make("training-cost", model, data, tmp_path / "out")
    results = record["results"]
    assert results["steps_in_all"] == [12_940, 10_000]
    for each, count, hours in zip(
        results["seconds_per_step"], results["steps_in_all"], results["hours"], strict=True
    ):
        assert hours == pytest.approx(each * count / 3600)
    (sheet,) = collected.sheets
    assert sheet.rows[-1] == ("Qwen2.5-7B-Instruct, paper", "11.21", "0.78")


def test_grpo_has_the_curves_of_its_log(model, data, tmp_path, monkeypatch):
    collected, record, _ = make("grpo", model, data, tmp_path / "out")
    curve = record["results"]["curve"]
    assert curve["step"][-1] == 400
    assert len(curve["reward"]) == len(curve["entropy"]) == len(curve["blocks"]) == 40
    stage, _ = collected.sheets
    assert stage.rows[-1][1] == f"{curve['reward'][-1]:.3f}"


def test_a_run_of_another_model_is_not_used(data, tmp_path):
    own = save_model(tmp_path / "model")
    make("grpo", own, data, tmp_path / "out")
    changed = BuddyForCausalLM.from_pretrained(own)
    for parameter in changed.router.parameters():
        parameter.data.add_(0.1)
    changed.save_pretrained(own)
    with pytest.raises(ResultError, match="another model, with other router"):
        make("grpo", own, data, tmp_path / "out")


def test_reuse_and_recompute_answer_the_same_dialogues(model, data, tmp_path):
    collected, record, _ = make("reuse", model, data, tmp_path / "out", rows=3)
    (sheet,) = collected.sheets
    for metric, blocks, recompute, reuse, difference in sheet.rows:
        if blocks != "6":
            gain = float(difference.split()[0])
            assert gain == pytest.approx(float(recompute) - float(reuse), abs=0.011), metric
    assert {point["samples"] for point in record["results"]["points"]} == {3}


def test_observations_have_both_figures(model, data, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="64"):
        make("observations", model, data, out)
    assert list(out.glob("*.png")) == []


def test_a_dtype_is_that_of_every_step(model, data, tmp_path):
    out = tmp_path / "out"
    _, record, said = make("omega", model, data, out, rows=1, dtype="bfloat16")
    assert "--dtype bfloat16 " in said[0]
    assert json.loads((out / "order-taylor.json").read_text())["config"]["dtype"] == (
        "torch.bfloat16"
    )
    trained = json.loads((out / "omega-0.7" / "record.json").read_text())
    assert trained["config"]["model"]["dtype"] == "bfloat16"
    assert record["config"]["dtype"] == "bfloat16"
    with pytest.raises(ResultError, match="another command"):
        make("omega", model, data, out, rows=1, dtype="float32")
