"""`benchmarks/predictor_price.py`: three splits apart, the price by one, the gains by another."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.records import read_record
from buddy.settings import read_recipe
from buddy.training.predictor.loss_table import LossTable
from buddy.training.predictor.recipe import BudgetRecipe
from buddy.training.predictor.rules import rewards_by_depth
from buddy.training.predictor.run import train_budget
from tests.product.training.made import examples, save_stage_1, write_recipe

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "predictor_price.py"


@pytest.fixture
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def folder(tmp_path):
    save_stage_1(tmp_path / "stage1")
    return tmp_path


def test_halves_share_no_row_and_have_every_other_of_each_source(script):
    rows = examples(9)
    table = LossTable(rows, torch.arange(9.0)[:, None], torch.arange(36.0).view(9, 4))
    choose, test = script["halves"](table)
    assert (choose.examples, test.examples) == (rows[::2], rows[1::2])
    assert torch.equal(test.by_depth, table.by_depth[1::2])
    assert torch.equal(test.summaries(test.examples), table.summaries(rows[1::2]))


def run(script, recipe, folder, *more):
    out = folder / "found.json"
    arguments = [str(recipe), "--out", str(out), "--runs", str(folder / "runs"), *more]
    sys.argv = [str(SCRIPT), *arguments]
    script["main"]()
    return read_record(out)["results"]


def test_the_price_is_the_surest_of_one_half_and_what_is_told_is_of_the_other(
    script, folder, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [])
    recipe = write_recipe(folder)
    found = run(script, recipe, folder, "--prices", "0.05", "2", "8", "--seeds", "0", "1")
    assert found["rows"] == {"train": 12, "choose": 5, "test": 5}
    sure = {
        each["price"]: script["sureness"](each["choosing"]["constant"]) for each in found["prices"]
    }
    assert sure[found["price"]] == max(sure.values())
    read = read_recipe(BudgetRecipe, recipe, [f"grpo.lambda_cost={found['price']}"])
    _, _, rows, train, held_out, left_out = script["tables"](read, folder / "runs")
    assert left_out == 0
    assert not {row.prompt for row in rows} & {row.prompt for row in held_out.examples}
    test = script["halves"](held_out)[1]
    worth = rewards_by_depth(test, read.grpo, 3).double()
    best = 3 + int(rewards_by_depth(train, read.grpo, 3).mean(0).argmax())
    rewards = []
    for seed in (0, 1):
        sets = [f"grpo.lambda_cost={found['price']}", f"optim.seed={seed}"]
        checkpoint = train_budget(
            read_recipe(BudgetRecipe, recipe, sets), folder / f"seed{seed}", resume=False
        )
        predictor = BuddyForCausalLM.from_pretrained(checkpoint).predictor
        chosen = predictor.choose(test.summaries(test.examples))
        rewards.append(worth.gather(1, chosen[:, None] - 3)[:, 0])
        assert found["chosen"][seed]["blocks"] == float(chosen.double().mean())
    gains = sum(rewards) / 2 - worth[:, best - 3]
    constant = found["tested"]["constant"]
    assert constant["gain"] == pytest.approx(float(gains.mean()), abs=1e-5)
    assert constant["error"] == pytest.approx(float(gains.std()) / 5**0.5, abs=1e-5)
    assert found["constant"]["blocks"] == best
    assert set(found["tested"]) == {"constant", "constant by source", "prompt length", "ridge"}
    printed = capsys.readouterr().out
    assert "| predictor less | mean blocks | all |" in printed
    assert f"price {found['price']:g}: " in printed
    # Another price is trained from the tables that are there.
    before = {
        path.name: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.safetensors")
    }
    run(script, recipe, folder, "--prices", "1", "--seeds", "0")
    assert before == {
        path.name: path.stat().st_mtime_ns for path in (folder / "runs").glob("*.safetensors")
    }


def test_too_few_prompts_for_two_halves_are_refused_before_anything_is_measured(
    script, folder, monkeypatch
):
    monkeypatch.setattr(sys, "argv", [])
    recipe = write_recipe(folder)
    (folder / "validation.jsonl").write_text((folder / "train.jsonl").read_text())
    with pytest.raises(ValueError, match=r"data\.validation: .* 4 prompts or more .* got none"):
        run(script, recipe, folder)
    assert not list((folder / "runs").glob("*"))
