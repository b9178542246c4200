"""Fitting a ledger: what is measured equals decoding, and what is fitted pays."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from filelock import FileLock
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.errors import RecipeError, TrainingError
from buddy.resume import ResumeFile
from buddy.training.ledger import fit
from buddy.training.ledger.fit import _spend, fit_ledger, sure_best
from buddy.training.ledger.measure import TokenLosses, Way, fed_losses, level_losses
from buddy.training.ledger.recipe import LedgerSettings
from buddy.training.state import LOCK, STATE, claimed_folder
from tests.product.generation.test_ledger_budget import random_ledger
from tests.product.training.examples import random_examples
from tests.product.training.made import save_stage_1, write_recipe
from tests.product.training.measured import measurements
from tests.tiny import NUM_BLOCKS, tiny_buddy
from tests.words import say

EXAMPLES = random_examples(10, seed=3)
SETTINGS = LedgerSettings(levels=(3, 4, 6), least=1)


def decoded(buddy, example, source, prompt):
    """Nats of an answer after its first token, fed a token at a time."""
    out = buddy(torch.tensor([example.prompt]), budget=source, prefill_budget=prompt)
    lost, ran = 0.0, []
    for fed, target in zip(example.answer, example.answer[1:], strict=False):
        out = buddy(
            torch.tensor([[fed]]), cache=out.cache,
            budget=source, prefill_budget=prompt,
        )  # fmt: skip
        ran.append(int(out.executed_blocks[0]))
        lost -= float(out.logits[0, -1].double().log_softmax(-1)[target])
    return lost, ran


@torch.no_grad()
def test_what_is_measured_is_what_decoding_loses(tmp_path):
    buddy = tiny_buddy(policy="static:3,1,2,4").eval()  # a router would see the answer, too
    made, levels = measurements(buddy, tmp_path), SETTINGS.levels
    answers = level_losses(made, "levels", buddy, EXAMPLES, levels, NUM_BLOCKS)
    buddy.ledger = random_ledger()
    source = buddy.ledger.budget(Fraction(9, 2))
    ways = [Way(buddy, NUM_BLOCKS, source.levels)]
    lost = fed_losses(made, "mean", EXAMPLES, ways, {}).sum((1, 2))
    for example, answer, nats in zip(EXAMPLES, answers, lost, strict=True):
        expected, executed = decoded(buddy, example, "mean:0.75", NUM_BLOCKS / NUM_BLOCKS)
        assert source.levels(example.answer[:-1]) == executed
        assert float(nats) == pytest.approx(expected, abs=2e-3)
        for place, level in enumerate(SETTINGS.levels):
            expected, _ = decoded(buddy, example, f"{level} blocks", 1.0)
            assert answer.losses[:, place].sum() == pytest.approx(expected, abs=2e-3)


def made_up(count=60, length=30):
    """Tokens below 5 gain much by depth; the others hardly any."""
    draw = np.random.default_rng(0)
    answers = []
    for _ in range(count):
        ids = draw.integers(0, 10, length)
        gain = np.where(ids < 5, 1.0, 0.05)[:, None] * np.array([0.0, 0.5, 1.0])
        noise = draw.normal(0, 0.1, (length, 3))
        answers.append(TokenLosses(tuple(ids.tolist()), (2 - gain + noise).astype(np.float32)))
    return answers


def test_blocks_go_to_the_tokens_that_gain_by_them():
    made = fit_ledger(made_up(), SETTINGS)
    spend = made.budget(Fraction(9, 2)).levels
    ids = list(np.random.default_rng(1).integers(0, 10, 400).tolist())
    spent = np.array(spend(ids))
    deep, others = spent[np.array(ids) < 5], spent[np.array(ids) >= 5]
    assert deep.mean() > others.mean() + 1.5
    assert 4.3 < spent.mean() <= 4.5


def test_what_cannot_be_told_from_chance_is_spent_as_constant_depth(monkeypatch):
    draw, answers = np.random.default_rng(1), []
    for _ in range(40):  # every token gains as much
        noise = draw.normal(0, 1, (20, 3))
        losses = 2 - np.array([0.0, 0.1, 0.3]) + noise
        ids = tuple(draw.integers(0, 10, 20).tolist())
        answers.append(TokenLosses(ids, losses.astype(np.float32)))
    made = fit_ledger(answers, SETTINGS)
    assert made.price(4.0) == made.price(6.0) == 0
    assert made.budget(Fraction(6)).levels([1, 2, 3, 4]) == [6, 6, 6, 6]
    assert fit_ledger(made_up(), SETTINGS).price(5.0) > 0
    monkeypatch.setattr(fit, "_SURE", -1e9)  # what would be chosen else
    assert fit_ledger(answers, SETTINGS).price(4.0) > 0


def test_the_best_of_many_prices_is_not_taken_for_a_gain():
    draw = np.random.default_rng(0)
    chance = draw.normal(0, 1, (60, 1000, 26))  # no price is better than another
    # Tested on the answers that a price is chosen on, 20 % seem to gain.
    assert (sure_best(chance) > 0).mean() < 0.08  # of 1,000 means
    better = chance.copy()
    better[:, :, 7] -= 2
    assert (sure_best(better) == 7).all()


def test_ways_side_by_side_spend_as_one_does():
    answers = made_up(3)
    made = fit_ledger(made_up(), SETTINGS)
    for mean in (3, 4, 5, 6):
        price = made.price(float(mean))
        for answer in answers:
            ran = made.budget(Fraction(mean)).levels(answer.token_ids)
            places = [SETTINGS.levels.index(level) for level in ran]
            expected = answer.losses[np.arange(len(ran)), places].sum()
            found = _spend(
                made, answer, np.array(SETTINGS.levels), np.array([mean, 4.0]),
                np.array([price, 0.2]),
            )  # fmt: skip
            assert found[0] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger")
    save_stage_1(path / "stage1")
    write_recipe(path)
    recipe = (path / "recipe.toml").read_text()
    recipe = recipe[: recipe.index("[optim]")] + "[ledger]\nlevels = [3, 4, 6]\nleast = 1\n"
    (path / "recipe.toml").write_text(recipe)
    return path


def test_the_command_leaves_a_checkpoint_and_a_record(folder):
    out = folder / "out"
    done = CliRunner().invoke(app, ["train-ledger", str(folder / "recipe.toml"), "--out", str(out)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert done.stdout.split() == [str(out / "checkpoint")]
    model = BuddyForCausalLM.from_pretrained(out / "checkpoint")
    assert model.ledger.config.levels == (3, 4, 6)
    results = json.loads((out / "record.json").read_text())["results"]
    assert [one["mean"] for one in results["evaluation"]] == [3, 4, 5, 6]
    for one in results["evaluation"]:
        assert one["blocks"] <= one["mean"]
        assert one["ledger"] - one["constant"] == pytest.approx(one["difference"])
    # At the ends there is nothing to choose.
    assert results["evaluation"][0]["difference"] == pytest.approx(0, abs=1e-6)


def test_a_fit_that_was_interrupted_goes_on_and_is_the_same(folder, tmp_path, monkeypatch):
    own, asked, most = Way.losses, [], 9  # of three levels: a batch of two is done by then

    def losses(way, batch, part):
        asked.append({example.answer for example in part})
        if len(asked) > most:
            raise KeyboardInterrupt
        return own(way, batch, part)

    def run(out):
        command = ["train-ledger", str(folder / "recipe.toml"), "--set", "ledger.batch_size=2"]
        return CliRunner().invoke(app, [*command, "--out", str(tmp_path / out)])

    def results(out):
        return json.loads((tmp_path / out / "record.json").read_text())["results"]

    monkeypatch.setattr(Way, "losses", losses)
    monkeypatch.setattr(ResumeFile, "write_if_due", lambda file, made: file.write(made()))
    stopped = run("parted")
    assert stopped.exit_code == 130
    said = " ".join(stopped.stderr.split())
    assert "interrupted: the same command goes on from what was measured" in said
    before, most = set().union(*asked), 1000
    asked.clear()
    assert run("parted").exit_code == 0
    assert before - set().union(*asked)
    assert run("whole").exit_code == 0
    assert results("parted") == results("whole")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("ledger.levels=[4, 3]", "ledger.levels must rise"),
        ("ledger.levels=[3, 9]", "9 blocks, and .* has 6"),
        ("means=[7]", "means must lie between the ledger's levels 3 and 6, got 7"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused(folder, tmp_path, change, what):
    command = ["train-ledger", str(folder / "recipe.toml"), "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*command, "--set", change])
    assert isinstance(done.exception, RecipeError)
    with pytest.raises(RecipeError, match=what):
        raise done.exception
    assert not (tmp_path / "o").exists()


def test_a_fit_leaves_another_run_in_its_folder_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(BuddyForCausalLM, "from_pretrained", None)  # nothing is loaded for it
    (tmp_path / STATE).write_bytes(b"of a run that takes steps")
    command = ["train-ledger", str(folder / "recipe.toml"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    with pytest.raises(TrainingError, match="holds a run already: go on with --resume, or name"):
        raise done.exception
    assert [path.name for path in tmp_path.iterdir()] == [STATE]


def test_of_two_fits_in_one_folder_the_second_is_refused(folder, tmp_path):
    command = ["train-ledger", str(folder / "recipe.toml"), "--out", str(tmp_path)]
    with claimed_folder(tmp_path, FileLock(tmp_path / LOCK)):
        done = CliRunner().invoke(app, command)
    assert f"another run is writing to {tmp_path}" in str(done.exception)
    assert "measuring" not in done.stderr


@pytest.mark.parametrize(
    ("split", "what"),
    [
        ("train", "data.train has 0 answers of two tokens or more"),
        ("validation", "data.validation has no answer of two tokens or more"),
    ],
)
def test_answers_that_feed_nothing_are_refused_before_any_is_measured(
    folder, tmp_path, monkeypatch, split, what
):
    lines = (folder / f"{split}.jsonl").read_text().splitlines()
    short = [{**json.loads(line), "completion": f" {say(5)}"} for line in lines]
    (tmp_path / "short.jsonl").write_text("\n".join(map(json.dumps, short)))
    monkeypatch.setattr("buddy.training.ledger.run.level_losses", None)
    change = f'data.{split}=[{{path="{tmp_path / "short.jsonl"}"}}]'
    command = ["train-ledger", str(folder / "recipe.toml"), "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*command, "--set", change])
    with pytest.raises(RecipeError, match=what):
        raise done.exception
    assert not (tmp_path / "o").exists()


def test_a_gain_is_found_however_answers_are_drawn():
    answers = made_up(40, length=20)
    for seed in range(5):
        np.random.default_rng(seed).shuffle(answers)
        assert fit_ledger(answers, SETTINGS).price(5.0) > 0
