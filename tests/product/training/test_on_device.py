"""Steps of each kind of training on a GPU, pretended or real: no mixed devices, one loss."""

import copy
from dataclasses import asdict

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.methods.adainfer.policy import AdaInferConfig
from buddy.methods.adainfer.run import collect_exit_features, fit_classifier
from buddy.methods.gated.run import evaluate_online
from buddy.methods.pudding.fit import PuddingFit
from buddy.methods.pudding.recipe import FitSettings as PuddingSettings
from buddy.methods.pudding.sets import Search, task_costs
from buddy.methods.pudding.targets import measure_targets
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.training.fast import fast_passes
from buddy.training.ledger.measure import Way, fed_losses, level_losses
from buddy.training.predictor.evaluation import evaluate_predictor
from buddy.training.predictor.loss_table import measure_table
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.predictor.trainer import PredictorTrainer
from buddy.training.route.fit import fit_router, new_router, seen_summaries
from buddy.training.route.losses import set_losses
from buddy.training.route.recipe import FitSettings
from buddy.training.router.evaluate import evaluate
from buddy.training.router.recipe import BudgetSettings
from tests import gpu
from tests.methods.gated import test_run as gated_runs
from tests.methods.layerskip import test_run as layerskip_runs
from tests.methods.pudding.test_run import CONFIG, KEPT, QUESTIONS, masks
from tests.product.policies.made import gated
from tests.product.training import test_joint as joint
from tests.product.training import test_predictor_trainer as predictors
from tests.product.training.examples import random_examples
from tests.product.training.measured import measurements
from tests.tiny import NUM_BLOCKS, tiny_buddy, tiny_model

pytestmark = pytest.mark.usefixtures("gpu")
EXAMPLES = random_examples(4, longest=4)
JOINT = {
    "softmax": {"router": {"relaxation": "softmax"}},
    "everything": {
        "router": {"relaxation": "gumbel", "second_route": 0.5, "dense_share": 1.0},
        "budget": BudgetSettings(full_prompts=0.7, mixed_answers=0.5, stretch=2),
        "optim": {"activation_checkpointing": True, "micro_batch_tokens": 32},
    },
    "policy-gradient": {"router": {"method": "policy-gradient", "samples": 2}},
    "measured": {"router": {"method": "measured", "samples": 3}},
    "random": {"policy": "random"},
    "teacher": {
        "router": {"relaxation": "sigmoid"},
        "teacher": {"share": 0.5},
        "optim": {"prompt_loss": 0.5, "average": 0.9},
    },
}


@pytest.fixture(autouse=True)
def few_examples(monkeypatch):
    for module in (joint, gated_runs, layerskip_runs):
        monkeypatch.setattr(module, "EXAMPLES", EXAMPLES)


def told(report):
    """A report but for the time it took."""
    return {name: value for name, value in asdict(report).items() if name != "seconds"}


def assert_same(made, expected):
    """Equal but for the order of sums, which a fit makes more of."""
    gpu.assert_same(made, expected, atol=1e-5, rtol=5e-4)


def step(trainer):
    """What a step gave, and its clipped gradients as AdamW remembers them."""
    report, state = told(trainer.step(0)), trainer.optimizer.state
    learned = {name: p for name, p in trainer.parameters.items() if p in state}
    return report, {name: state[p]["exp_avg"].cpu() for name, p in learned.items()}


def assert_same_step(made, expected):
    (report, gradients), (wanted, wanted_gradients) = made, expected
    assert report.pop("plans") == wanted.pop("plans")
    assert_same(report, wanted)
    assert_same(gradients, wanted_gradients)


def there(trainer, monkeypatch):
    """A trainer of the same recipe whose model, and teacher, are on the device."""
    monkeypatch.setattr(
        "buddy.training.router.trainer.load_teacher",
        lambda *_: None if trainer.teacher is None else gpu.move(trainer.teacher),
    )
    made = type(trainer)(gpu.move(trainer.model), trainer.recipe, trainer.order.examples)
    assert all(gpu.is_there(p) for p in made.parameters.values())
    return made


@pytest.mark.parametrize("kind", JOINT)
def test_joint_training(kind, tmp_path, monkeypatch):
    settings = copy.deepcopy(JOINT[kind])
    if "teacher" in settings:
        tiny_model(seed=5).save_pretrained(tmp_path)
        settings["teacher"]["name"] = str(tmp_path)
    if kind == "everything":  # what is computed again is computed by autograd, which knows no
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        monkeypatch.setitem(checks, "default", lambda _: None)  # pretended device
    trainer = joint.trainer(**settings)
    expected = step(joint.trainer(**settings))
    with gpu.on_gpu():
        made = step(there(trainer, monkeypatch))
    assert_same_step(made, expected)


@pytest.mark.parametrize("method", gated_runs.METHODS)
def test_gated_training(method, monkeypatch):
    # A target that no token meets exactly, where the cost has a kink.
    gates = {"target": 0.43} if method == "d-llm" else {}
    expected = step(gated_runs.trainer(method, **gates))
    with gpu.on_gpu():
        made = step(there(gated_runs.trainer(method, **gates), monkeypatch))
    assert_same_step(made, expected)


def test_layerskip_training(monkeypatch):
    expected = step(layerskip_runs.trainer())
    with gpu.on_gpu():
        made = step(there(layerskip_runs.trainer(), monkeypatch))
    assert_same_step(made, expected)


def on_both(make, work):
    """What the work gives of a model on the CPU, and of one that is on the device."""
    expected = work(make())
    with gpu.on_gpu():
        made = work(gpu.move(make()))
    return made, expected


@pytest.mark.parametrize("online", [False, True])
def test_evaluation_in_training(online):
    def work(model):
        if online:
            evaluations, counts = evaluate_online(model, EXAMPLES, [])
        else:
            evaluations, counts = evaluate(model, EXAMPLES, [3, 4])
        return [asdict(each) for each in evaluations], counts.num_distinct

    assert_same(*on_both(lambda: gated("first") if online else tiny_buddy(), work))


def test_the_predictor(tmp_path):
    def work(model):
        model.requires_grad_(False)
        live = RewardModel(model)
        path = tmp_path / f"{model.device.type}.safetensors"
        table = measure_table(live, EXAMPLES, path, lowest=3, batch_size=4)
        found = []
        for prompts in (live, table):
            torch.manual_seed(0)
            predictor = BudgetPredictor(model.router.config)
            predictor = predictor if model.device.type == "cpu" else gpu.move(predictor)
            trainer = PredictorTrainer(predictor, prompts, predictors.recipe(), EXAMPLES)
            found += [told(trainer.step(0))]
            found.append(asdict(evaluate_predictor(predictor, table, predictors.recipe().grpo)))
        return found

    assert_same(*on_both(tiny_buddy, work))


def test_the_ledger(tmp_path):
    def work(model):
        folder = tmp_path / model.device.type
        folder.mkdir()
        made = measurements(model, folder)
        answers = level_losses(made, "levels", model, EXAMPLES, (3, 4, 6), NUM_BLOCKS)
        ways = [Way(model, NUM_BLOCKS, lambda fed: [4] * len(fed))]
        lost = fed_losses(made, "mean", EXAMPLES, ways, {})
        return [torch.from_numpy(answer.losses) for answer in answers], lost

    assert_same(*on_both(tiny_buddy, work))


def test_search_and_fit_of_a_route():
    sets = torch.ones(3, NUM_BLOCKS, dtype=torch.bool)
    sets[1, 1], sets[2, [2, 3]] = False, False
    orders = {"a": (1, 2, 3, 4), "b": (4, 3, 2, 1)}

    def work(model):
        router = new_router(model, orders["a"], FitSettings(rank=4), 0)
        with fast_passes(model.backbone):
            losses = set_losses(model.backbone, EXAMPLES, sets[None])
            summaries = {
                name: seen_summaries(model, router, EXAMPLES[start : start + 2])
                for name, start in (("a", 0), ("b", 2))
            }
        ranked = fit_router(router, summaries, orders, FitSettings(rank=4, steps=10), 0)
        assert router.decision.down.weight.device.type == model.device.type
        return losses.nats, losses.tokens, summaries, ranked

    assert_same(*on_both(lambda: tiny_buddy(policy="full"), work))


def test_adainfer():
    config = AdaInferConfig(num_blocks=NUM_BLOCKS, first_exit=3)

    def work(model):
        exits = collect_exit_features(model, EXAMPLES, 3, tokens=1000, seed=0)
        classifier, fitted = fit_classifier(exits, config, folds=2, ridge=1e-4)
        return exits.features, exits.settled, classifier.weight, [asdict(each) for each in fitted]

    assert_same(*on_both(lambda: BuddyForCausalLM(tiny_model(), policy="full"), work))


@pytest.mark.parametrize("loss", ["likelihood", "margin"])
def test_pudding(loss, tmp_path):
    def work(model):
        backbone = model.backbone
        costs = task_costs(backbone, Search("task", loss, QUESTIONS), masks(KEPT), batch_size=3)
        path = tmp_path / f"{model.device.type}.safetensors"
        targets = measure_targets(backbone, CONFIG, EXAMPLES, path, batch_size=4, identity={})
        fit = PuddingFit(CONFIG, targets, PuddingSettings(epochs=1, batch_size=4))
        return costs.cpu(), targets.log_likelihoods, targets.summaries, [fit.step(0), fit.step(1)]

    assert_same(*on_both(lambda: BuddyForCausalLM(tiny_model(), policy="full"), work))
