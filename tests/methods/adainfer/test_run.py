"""AdaInfer's fit: features and labels, the classifiers, the threshold, and a whole run."""

import json
import math

import pytest
import torch
from filelock import FileLock
from torch.testing import assert_close
from typer.testing import CliRunner

from buddy import BuddyForCausalLM
from buddy.cli.main import app
from buddy.errors import DataError, RecipeError, TrainingError
from buddy.methods.adainfer.logistic import cross_validated, fit_logistic
from buddy.methods.adainfer.policy import AdaInferConfig, AdaInferPolicy, logit_features
from buddy.methods.adainfer.recipe import ClassifierSettings
from buddy.methods.adainfer.run import ExitFeatures, collect_exit_features, fit_classifier
from buddy.methods.threshold import find_threshold, mean_depth
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import LoraSettings
from buddy.training.state import LOCK, claimed_folder
from tests.product.training.examples import random_examples
from tests.product.training.made import write_recipe
from tests.tiny import NUM_BLOCKS, tiny_model
from tests.words import word_tokenizer

EXAMPLES = random_examples(20)


def drawn(rows, *, seed=0):
    """Features and labels that follow a known law: log-odds 4 a - 2 b - 1."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.rand(rows, 2, generator=generator) * torch.tensor([1.0, 10.0])
    odds = 4 * features[:, 0] - 0.2 * features[:, 1] - 1
    return features, torch.rand(rows, generator=generator) < odds.sigmoid()


def test_a_fit_finds_the_law_that_labels_follow():
    features, labels = drawn(40_000)
    made = fit_logistic(features, labels, 1e-6)
    # A few standard errors of as many rows.
    assert_close(made.weight, torch.tensor([4.0, -0.2]).double(), atol=0.2, rtol=0)
    assert float(made.bias) == pytest.approx(-1, abs=0.15)


def test_the_slope_of_the_loss_vanishes_at_the_fit():
    features, labels = drawn(300)
    made = fit_logistic(features, labels, 1e-9)
    rest = made.scores(features).sigmoid() - labels.double()
    assert_close(rest.mean(), torch.zeros(()).double(), atol=1e-6, rtol=0)
    assert_close((rest[:, None] * features).mean(0), torch.zeros(2).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_and_constant_features_have_a_finite_fit(label):
    made = fit_logistic(torch.ones(50, 2), torch.full((50,), label), 1e-4)
    assert made.weight.tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert math.isfinite(made.bias)
    assert (float(made.bias) > 0) == label


def test_a_fold_is_told_by_the_others_alone():
    # Each row's label is its own feature's sign, but for group 0, where it is the opposite: told by
    # the others, all of group 0 is wrong.
    feature = torch.tensor([[-1.0, 0.0], [1.0, 0.0]] * 30)
    groups = torch.arange(60) // 20
    labels = (feature[:, 0] > 0) ^ (groups == 0)
    accuracy, nats = cross_validated(feature[:40], labels[:40], groups[:40], 2, 1e-4)
    assert accuracy == 0.0
    assert nats > 1
    accuracy, _ = cross_validated(feature[20:], labels[20:], groups[20:], 2, 1e-4)
    assert accuracy == 1.0


def test_a_look_is_what_full_depth_shows_before_each_block():
    model = BuddyForCausalLM(tiny_model(), policy="layerskip")
    found = collect_exit_features(model, EXAMPLES, 3, tokens=10**6, seed=0)
    assert len(found.rows) == sum(len(one.answer) for one in EXAMPLES)
    for row, one in enumerate(EXAMPLES):
        ids = torch.tensor([[*one.prompt, *one.answer]])
        at = slice(len(one.prompt) - 1, ids.shape[1] - 1)
        mine = found.rows == row
        with torch.no_grad():
            last = model(ids).logits[0, at].argmax(-1)
            for place, block in enumerate(range(3, NUM_BLOCKS)):
                logits = model(ids, budget=f"{block} blocks").logits[0, at]
                # atol: rows are padded side by side, in another order of sums.
                assert_close(
                    found.features[mine, place], logit_features(logits), atol=1e-4, rtol=1e-4
                )
                assert torch.equal(found.settled[mine, place], logits.argmax(-1) == last)
    some = collect_exit_features(model, EXAMPLES, 3, tokens=7, seed=1)
    assert some.features.shape == (7, 3, 2)
    # atol: fewer tokens at once, another order of sums.
    apart = (some.features[:, None] - found.features).abs().amax((2, 3))
    assert float(apart.amin(1).max()) < 1e-5


def test_classifiers_tell_apart_what_their_features_tell_apart():
    features, labels = torch.zeros(400, 3, 2), torch.zeros(400, 3, dtype=torch.bool)
    for place in range(3):
        features[:, place], labels[:, place] = drawn(400, seed=place)
    exits = ExitFeatures(features, labels, torch.arange(400) % 10)
    config = AdaInferConfig(num_blocks=NUM_BLOCKS, first_exit=3)
    made, fitted = fit_classifier(exits, config, folds=5, ridge=1e-4)
    assert [one.block for one in fitted] == [3, 4, 5]
    for place, one in enumerate(fitted):
        assert one.settled == pytest.approx(float(labels[:, place].float().mean()))
        assert max(one.settled, 1 - one.settled) < one.accuracy < 1
        expected = fit_logistic(features[:, place], labels[:, place], 1e-4)
        with torch.no_grad():
            found = made.settled(one.block, features[:, place])
        assert_close(found, expected.scores(features[:, place]).sigmoid(), atol=1e-6, rtol=1e-5)
    alone = ExitFeatures(features, labels, torch.zeros(400).long())
    with pytest.raises(DataError, match="2 rows or more"):
        fit_classifier(alone, config, folds=5, ridge=1e-4)


def test_a_threshold_is_found_for_a_depth_that_there_is():
    asked = []

    def depth_at(threshold):
        asked.append(threshold)
        return 8 + 22 * threshold

    options = {"least": 8.0, "most": 30.0, "tolerance": 0.1}
    threshold, depth = find_threshold(depth_at, 22.0, **options)
    assert depth == pytest.approx(8 + 22 * threshold)
    assert abs(depth - 22) <= 0.1
    assert all(0 < one < 1 for one in asked)
    assert len(asked) < 12
    assert find_threshold(depth_at, 30.0, **options) == (1.0, 30.0)
    assert find_threshold(depth_at, 8.05, **options) == (0.0, 8.0)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [(4.0, "from 8 to 30"), (31.0, "from 8 to 30"), (20.0, r"from 8\.00 to 30\.00 in one step")],
)
def test_a_depth_that_no_threshold_meets_is_refused_in_one_line(wanted, says):
    with pytest.raises(TrainingError, match=says) as refused:
        find_threshold(
            lambda threshold: 8.0 if threshold < 0.7 else 30.0,
            wanted,
            least=8.0,
            most=30.0,
            tolerance=0.25,
        )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("depth", ["auto", "0 blocks", "many"])
def test_a_mean_depth_that_is_none_is_refused(depth):
    with pytest.raises((RecipeError, ValueError), match="blocks"):
        ClassifierSettings(mean_depth=depth)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    tiny_model("qwen3").save_pretrained(path / "stage1")
    word_tokenizer().save_pretrained(path / "stage1")
    return path


def train(folder, out, **settings):
    path = write_recipe(folder)
    text = path.read_text().split("[optim]")[0]
    text += "[classifier]\n"
    text += "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    path.write_text('method = "adainfer"\n' + text)
    return CliRunner().invoke(app, ["train", str(path), "--out", str(out)])


def test_of_two_fits_in_one_folder_the_second_is_refused(folder, tmp_path):
    with claimed_folder(tmp_path, FileLock(tmp_path / LOCK)):
        done = train(folder, tmp_path, first_exit=3)
    assert f"another run is writing to {tmp_path}" in str(done.exception)
    assert "told right" not in done.stderr


def test_a_run_writes_a_checkpoint_of_the_wanted_depth(folder, tmp_path):
    done = train(folder, tmp_path, first_exit=3, mean_depth="4 blocks", tolerance=0.2)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert done.stdout == f"{tmp_path / 'checkpoint'}\n"
    assert "told right" in done.stderr
    record = json.loads((tmp_path / "record.json").read_text())
    found = record["results"]
    assert [one["block"] for one in found["classifiers"]] == [3, 4, 5]
    assert abs(found["mean_blocks"] - 4) <= 0.2
    made = BuddyForCausalLM.from_pretrained(tmp_path / "checkpoint")
    assert isinstance(made.policy, AdaInferPolicy)
    assert made.policy.threshold == found["threshold"]
    assert NUM_BLOCKS > mean_depth(made, made.policy, EXAMPLES) > 3


def test_classifiers_are_fitted_on_a_checkpoint_that_was_trained_for_exits(tmp_path):
    adapted = add_lora(tiny_model("qwen3"), LoraSettings(rank=2), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    base = BuddyForCausalLM(adapted, policy="layerskip")
    base.save_pretrained(tmp_path / "stage1", tokenizer=word_tokenizer())
    done = train(tmp_path, tmp_path / "out", first_exit=3, threshold=0.4)
    assert done.exit_code == 0, (done.stderr, done.exception)
    made = BuddyForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint")
    assert made.policy.threshold == 0.4
    ids = torch.tensor([EXAMPLES[0].prompt])
    with torch.no_grad():
        expected = base(ids, budget="3 blocks").logits
        made.set_policy("adainfer:0")
        assert_close(made(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"first_exit": 6}, "first_exit must be below the model's 6 blocks, got 6"),
        ({"first_exit": 4, "mean_depth": "3 blocks"}, "must be from 4 blocks, the first exit, to"),
        ({"first_exit": 4, "mean_depth": "7 blocks"}, "the first exit, to the model's 6, got 7"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(folder, tmp_path, settings, says):
    done = train(folder, tmp_path, **settings)
    assert done.exit_code != 0
    assert says in str(done.exception)
    assert not (tmp_path / "checkpoint").exists()
