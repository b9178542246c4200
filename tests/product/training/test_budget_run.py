"""A whole run of stage 2: from recipe to a checkpoint that chooses, and on after a kill."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.errors import CheckpointError, DataError, RecipeError, TrainingError
from buddy.settings import read_recipe
from buddy.training.batches import BatchOrder
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.run import rows_of_steps, train_budget
from buddy.training.run import RunListener
from tests.product.training.made import examples, save_stage_1, write_recipe
from tests.tiny import random_ids


@pytest.fixture
def folder(tmp_path):
    save_stage_1(tmp_path / "stage1")
    return tmp_path


def run(folder, out="out", *, resume=False, listener=None, **settings):
    recipe = read_recipe(BudgetRecipe, write_recipe(folder, **settings))
    return train_budget(recipe, folder / out, resume=resume, listener=listener)


def lines(folder, out="out"):
    return [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]


def state(folder, out="out"):
    return load_file(folder / out / "state.safetensors")


def test_a_run_makes_a_checkpoint_that_chooses(folder):
    checkpoint = run(folder, predictor__rank=7, optim__standardise=False)
    model = BuddyForCausalLM.from_pretrained(checkpoint)
    stage_1 = BuddyForCausalLM.from_pretrained(folder / "stage1")
    assert model.predictor.config.rank == 7
    assert "## Budget Predictor" in model.card.text
    trained = state(folder)
    for name, parameter in model.predictor.named_parameters():
        assert torch.equal(parameter, trained[f"parameter.{name}"])
    assert model.predictor.up.weight.abs().max() > 0
    ids = random_ids(3, 7)
    with torch.no_grad():
        auto = model(ids, budget="auto")
        named = stage_1(ids, budget=auto.executed_blocks)
    assert torch.equal(auto.logits, named.logits)
    record = json.loads((folder / "out/record.json").read_text())
    assert record["kind"] == "training-budget"
    assert record["config"]["num_blocks"] == 6
    assert record["results"]["curve"]["step"] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert len(record["results"]["curve"]["reward"]) == 8
    assert [line["step"] for line in lines(folder) if line["kind"] == "evaluation"] == [20, 40]
    evaluation = record["results"]["evaluation"]
    assert evaluation["rows"] == 10
    (source,) = evaluation["by_source"].values()
    assert source["blocks"] == evaluation["blocks"]
    by_source = [line for line in lines(folder) if line["kind"].startswith("evaluation/")]
    assert [line["blocks"] for line in by_source][-1] == evaluation["blocks"]


def test_what_is_saved_reads_summaries_as_they_are(folder):
    checkpoint = run(folder)
    learned, table = state(folder), load_file(folder / "out/train-losses.safetensors")
    summaries = table["summaries"]  # of all 12 rows, so mean and deviation are theirs
    heard = (summaries - summaries.mean(0)) / summaries.std(0)
    down = heard @ learned["parameter.down.weight"].T + learned["parameter.down.bias"]
    up = torch.nn.functional.silu(down) @ learned["parameter.up.weight"].T
    with torch.no_grad():
        found = BuddyForCausalLM.from_pretrained(checkpoint).predictor(summaries)
    expected = up + learned["parameter.up.bias"]
    assert_close(found, expected, atol=1e-4, rtol=1e-4)  # sums of other sizes
    assert expected.std(0).max() > 0.01
    raw = run(folder, "raw", optim__standardise=False)
    with torch.no_grad():
        other = BuddyForCausalLM.from_pretrained(raw).predictor(summaries)
    assert not torch.allclose(found, other, atol=0.01)


def kill_at(step):
    """Stops a run after so many steps, as Ctrl-C would."""

    def stepped(done, numbers):
        if done == step:
            raise KeyboardInterrupt

    return RunListener(stepped=stepped)


@pytest.mark.parametrize(
    ("precompute", "standardise"), [(True, True), (False, True), (True, False)]
)
def test_killed_and_resumed_it_comes_to_the_same_end(folder, precompute, standardise):
    options = {"measure__precompute": precompute, "log__every": 4, "optim__steps": 24}
    options["optim__standardise"] = standardise
    run(folder, "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "out", listener=kill_at(17), **options)
    assert not (folder / "out/checkpoint").exists()
    begun = []
    listener = RunListener(started=lambda step, steps: begun.append((step, steps)))
    run(folder, "out", resume=True, listener=listener, **options)
    assert begun == [(10, 24)]
    whole, again = state(folder, "whole"), state(folder)
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
    without_time = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in lines(folder, out)]
        for out in ("whole", "out")
    ]
    assert without_time[0] == without_time[1]
    # Done already, it does nothing more and says the same.
    run(folder, "out", resume=True, **options)
    record = json.loads((folder / "out/record.json").read_text())
    assert record["results"]["evaluation"]["rows"] == 10


def test_a_constant_predictor_is_warned_of(folder):
    warnings = []
    run(
        folder,
        listener=RunListener(warned=warnings.append),
        grpo__lambda_perf=0.0,
        grpo__lambda_cost=5.0,
        log__evaluate_every=0,
    )
    assert len(warnings) == 2
    assert "collapsed: it chooses 3 blocks for every validation prompt" in warnings[0]
    assert warnings[1].startswith("a constant 3 blocks is as good (+0.000 ± 0.000 over 10 prompts)")
    assert lines(folder)[-1]["kind"] == "warning"


def test_a_checkpoint_says_what_its_predictor_was_measured_against(folder):
    checkpoint = run(folder)
    record = json.loads((folder / "out/record.json").read_text())
    rules = record["results"]["evaluation"]["rules"]
    assert set(rules) == {"constant", "constant by source", "prompt length", "ridge"}
    constant = BuddyForCausalLM.from_pretrained(checkpoint).predictor.constant
    assert (constant.gain, constant.error) == (
        rules["constant"]["gain"],
        rules["constant"]["error"],
    )
    assert constant.by_kind == {f"{folder.name}/train": constant.blocks}
    card = BuddyForCausalLM.from_pretrained(checkpoint).card.text
    assert f"Mean reward on held-out prompts: {constant.describe()}." in card
    beside = [line for line in lines(folder) if line["kind"] == "beside/constant"]
    assert [line["step"] for line in beside] == [20, 40]
    assert beside[-1]["gain"] == constant.gain


def test_a_live_run_has_no_losses_to_fit_rules_to(folder):
    checkpoint = run(folder, measure__precompute=False)
    assert BuddyForCausalLM.from_pretrained(checkpoint).predictor.constant is None
    record = json.loads((folder / "out/record.json").read_text())
    assert record["results"]["evaluation"]["rules"] == {}


def test_rows_that_no_step_sees_are_not_measured(folder):
    measured = []
    listener = RunListener(measured=lambda what, done, total: measured.append((what, total)))
    run(folder, listener=listener, optim__steps=4, log__evaluate_every=0)
    assert set(measured) == {
        ("measuring training prompts", 8),
        ("measuring validation prompts", 10),
    }
    recipe = read_recipe(BudgetRecipe, folder / "recipe.toml")
    rows = examples(12)
    order = BatchOrder(rows, 2, recipe.optim.seed)
    seen = [row for row in rows if any(row in order[step] for step in range(4))]
    assert rows_of_steps(recipe, rows) == seen
    assert rows_of_steps(replace(recipe, optim=replace(recipe.optim, steps=7)), rows) == rows


def test_a_run_is_neither_overwritten_nor_mixed_with_another(folder):
    run(folder)
    with pytest.raises(TrainingError, match="holds a run already"):
        run(folder)
    with pytest.raises(TrainingError, match=r"another run, with other grpo\."):
        run(folder, resume=True, grpo__lambda_cost=1.0)


def test_a_loss_that_becomes_nan_leaves_state_and_tables(folder, monkeypatch):
    from buddy.training.predictor import trainer as predictor_trainer

    original, calls = predictor_trainer.rewards, []

    def spoilt(*arguments):
        calls.append(1)
        return original(*arguments) * (torch.nan if len(calls) > 25 else 1)

    monkeypatch.setattr(predictor_trainer, "rewards", spoilt)
    with pytest.raises(TrainingError, match="step 26 is NaN"):
        run(folder)
    assert all(value.isfinite().all() for value in state(folder).values())
    monkeypatch.undo()
    begun = []
    run(
        folder,
        resume=True,
        listener=RunListener(started=lambda step, steps: begun.append(step)),
    )
    assert begun == [20]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"grpo__lambda": 1.0}, RecipeError, "unknown key lambda: expected samples, lambda_perf"),
        ({"grpo__samples": 1}, RecipeError, "samples must be at least 2"),
        ({"optim__steps": 0}, RecipeError, "steps must be at least 1 and at most"),
        ({"optim__learning_rate": "fast"}, RecipeError, "expected float"),
        ({"optim__batch_size": 13}, RecipeError, "12 training rows do not fill"),
        ({"log__every": 0}, RecipeError, "every"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_before_anything_is_measured(
    folder, settings, error, says
):
    with pytest.raises(error, match=says):
        run(folder, **settings)
    assert not list((folder / "out").glob("*.safetensors"))


def test_bad_surroundings_are_refused(folder):
    recipe = read_recipe(BudgetRecipe, write_recipe(folder))
    (folder / "file").write_text("mine")
    with pytest.raises(TrainingError, match="cannot be made"):
        train_budget(recipe, folder / "file/out")
    (folder / "train.jsonl").write_text('{"question": "w3"}\n')
    with pytest.raises(DataError, match="expected instruction and output"):
        train_budget(recipe, folder / "out")
    manifest = folder / "stage1/buddy.json"
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="is no JSON"):
        train_budget(recipe, folder / "out")
