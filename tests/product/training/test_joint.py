"""Steps of stage 1 on a tiny model."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.data.examples import Source
from buddy.errors import RecipeError, TrainingError
from buddy.training.recipe import DataSettings
from buddy.training.router.averaging import WeightMean
from buddy.training.router.budgets import budget_range, budgets_at
from buddy.training.router.evaluate import evaluate
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import (
    BudgetSettings,
    LoraSettings,
    OptimSettings,
    Recipe,
    RouterSettings,
    TeacherSettings,
)
from buddy.training.router.trainer import JointTrainer, policy_gradient_loss
from buddy.training.schedule import learning_rate_share
from tests.product.training.examples import random_examples
from tests.tiny import NUM_BLOCKS, random_router, tiny_model

EXAMPLES = random_examples(24)


def recipe(*, router=None, optim=None, budget=None, lora=None, teacher=None):
    return Recipe(
        data=DataSettings(train=(Source(path="unused"),), max_tokens=24),
        router=RouterSettings(**(router or {})),
        optim=OptimSettings(
            **{"learning_rate": 1e-2, "warmup_steps": 1, "steps": 12, "batch_size": 4}
            | (optim or {})
        ),
        budget=budget or BudgetSettings(),
        lora=LoraSettings(**(lora or {"rank": 4})),
        teacher=TeacherSettings(**(teacher or {})),
    )


def routed_model(policy="routed", rank=4):
    model = tiny_model()
    router = random_router(model, scale=0.5) if policy == "routed" else None
    adapted = add_lora(model, LoraSettings(rank=rank), seed=0)
    return BuddyForCausalLM(adapted, router=router, policy=policy).train()


def trainer(policy="routed", *, process=(0, 1), **settings):
    settings["router"] = {"policy": policy, **settings.get("router", {})}
    rank = settings.get("lora", {"rank": 4})["rank"]
    return JointTrainer(routed_model(policy, rank), recipe(**settings), EXAMPLES, process=process)


def weights(of):
    return {name: p.detach().clone() for name, p in of.parameters.items()}


def test_a_learning_rate_of_zero_leaves_the_router_as_it_starts():
    made = trainer(optim={"router_learning_rate": 0.0})
    before = weights(made)
    made.step(0)
    moved = {name for name, p in made.parameters.items() if not torch.equal(p, before[name])}
    assert moved
    assert not any(name.startswith("router.") for name in moved)
    assert not any(p.requires_grad for p in made.model.router.parameters())  # no gate is taken
    learns = trainer(optim={"router_learning_rate": 1e-30})
    learns.step(0)
    adapters = {name: p for name, p in made.parameters.items() if "lora_" in name}
    for name, parameter in adapters.items():
        assert torch.equal(parameter, learns.parameters[name])  # gates change nothing else
    shared = trainer(process=(0, 2), optim={"router_learning_rate": 0.0})
    assert shared.step(0).router_grad_norm is None
    with pytest.raises(RecipeError, match="router_learning_rate must be at least 0 and at most 1"):
        recipe(optim={"router_learning_rate": -1e-3})


@pytest.mark.parametrize(
    "router",
    [
        {"relaxation": "softmax"},
        {"relaxation": "scaled-softmax", "dense_share": 0.5},
        {"relaxation": "skipped-softmax", "dense_share": 1.0},
        {"relaxation": "sigmoid", "second_route": 1.0},
        {"relaxation": "gumbel"},
        {"method": "policy-gradient", "samples": 3},
        {"method": "measured", "samples": 3},
        {"policy": "random"},
    ],
)
def test_the_loss_falls_and_everything_trained_moves(router):
    made = trainer(**{"policy": router.pop("policy", "routed"), "router": router})
    before = weights(made)
    reports = [made.step(step) for step in range(12)]
    assert sum(r.loss for r in reports[-4:]) < sum(r.loss for r in reports[:4])
    moved = [name for name, p in made.parameters.items() if not torch.equal(p, before[name])]
    assert sorted(moved) == sorted(before)
    for report in reports:
        assert all(3 <= len(plan) <= NUM_BLOCKS for plan in report.plans)
        assert sum(count for _, count in report.by_budget.values()) == len(report.plans)
        assert (report.router_grad_norm is not None) == (made.model.router is not None)


def test_every_example_draws_its_own_budget_from_the_whole_range():
    made = trainer(budget=BudgetSettings(low="0.5", high="1.0"))
    drawn = [made.step(step).by_budget.keys() for step in range(12)]
    assert set().union(*drawn) == {3, 4, 5, 6}
    assert any(len(one) > 1 for one in drawn)


@pytest.mark.parametrize(
    ("method", "is_taught"),
    [("policy-gradient", False), ("policy-gradient", True), ("measured", False)],
)
def test_two_processes_make_the_gradient_of_one(method, is_taught, tmp_path):
    settings = {"router": {"method": method}}
    if is_taught:
        tiny_model(seed=5).save_pretrained(tmp_path)
        settings["teacher"] = {"name": str(tmp_path), "share": 0.5}
        settings["optim"] = {"prompt_loss": 0.5}
    alone = trainer(**settings)
    alone_rows = alone._backward(alone.order[0], seed=5, step=0)
    parts = []
    for rank in range(2):
        made = trainer(process=(rank, 2), **settings)
        made._reduce = lambda whole: whole
        rows = made._backward(made.order[0], seed=5, step=0)
        parts.append(
            (
                rows,
                {
                    n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for n, p in made.parameters.items()
                },
            )
        )
    for found, expected in zip(sorted(parts[0][0] + parts[1][0]), sorted(alone_rows), strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-5)
        assert found[1:3] == expected[1:3]
        assert found[3] == pytest.approx(expected[3])
    for name, parameter in alone.parameters.items():
        whole = parts[0][1][name] + parts[1][1][name]
        assert_close(whole, parameter.grad, atol=1e-5, rtol=1e-4)  # other sums
        # B starts at zero, so A has no slope yet.
        assert (whole.abs().max() > 0) == ("lora_A" not in name)


@pytest.mark.parametrize("kind", ["mixed depths", "sampled plans", "measured", "a teacher"])
def test_micro_batches_make_the_gradient_of_the_batch(kind, tmp_path):
    settings = {"router": {"relaxation": "gumbel", "second_route": 0.5, "dense_share": 1.0}}
    settings["budget"] = BudgetSettings(full_prompts=0.7, mixed_answers=0.5, stretch=2)
    if kind == "sampled plans":
        settings = {"router": {"method": "policy-gradient"}}
    elif kind == "measured":
        settings = {"router": {"method": "measured", "samples": 3}}
    elif kind == "a teacher":
        tiny_model(seed=5).save_pretrained(tmp_path)
        settings["teacher"] = {"name": str(tmp_path), "share": 0.5}
        settings["optim"] = {"prompt_loss": 0.5}
    found = []
    for most in (0, 48):
        optim = {"batch_size": 8, "micro_batch_tokens": most} | settings.get("optim", {})
        made = trainer(**settings | {"optim": optim})
        examples = sorted(made.order[0], key=lambda example: -example.num_tokens)
        shares = list(made._shares(examples))
        assert (len(shares) > 1) == (most > 0)
        assert sorted({row for share in shares for row in share.rows}) == list(range(8))
        for share in shares:
            assert not most or len(share.rows) * share.batch.lengths.max() <= most
        rows = made._backward(examples, seed=5, step=0)
        found.append((rows, {name: p.grad for name, p in made.parameters.items()}))
    (whole_rows, whole), (rows, parts) = found
    for row, expected in zip(rows, whole_rows, strict=True):
        assert row == (pytest.approx(expected[0], abs=1e-5), *expected[1:])
    for name, gradient in whole.items():
        assert_close(parts[name], gradient, atol=1e-5, rtol=1e-4)  # other sums


def test_a_micro_batch_that_does_not_hold_an_example_is_refused():
    with pytest.raises(RecipeError, match=r"micro_batch_tokens must be at least 24, .* got 23"):
        recipe(optim={"micro_batch_tokens": 23})
    sampled = {"method": "policy-gradient", "samples": 3}
    with pytest.raises(RecipeError, match=r"micro_batch_tokens must be at least 72, .* got 71"):
        recipe(optim={"micro_batch_tokens": 71}, router=sampled)
    assert recipe(optim={"micro_batch_tokens": 72}, router=sampled).plans == 3


def test_a_step_minimises_what_the_recipe_weighs(tmp_path):
    tiny_model(seed=5).save_pretrained(tmp_path)
    full = BudgetSettings(choices=("1.0",))
    teacher = {"name": str(tmp_path), "weight": 0.7}
    made = trainer("random", budget=full, teacher=teacher, optim={"prompt_loss": 0.5})
    examples = made.order[0]
    made._backward(examples, seed=5, step=0)
    found = {name: p.grad.clone() for name, p in made.parameters.items() if p.grad is not None}
    made.optimizer.zero_grad()
    prompts, answers, taught = [], [], []
    for example in examples:
        ids = torch.tensor([example.prompt + example.answer])
        log_probs = made.model.model(ids).logits[0, :-1].log_softmax(1)
        nll = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
        with torch.no_grad():
            wanted = made.teacher.model(ids).logits[0, :-1].softmax(1)
        begin = len(example.prompt) - 1
        prompts.append(nll[:begin])
        answers.append(nll[begin:])
        taught.append(-(wanted * log_probs).sum(1))
    means = (torch.cat(one).mean() for one in (prompts, answers, taught))
    loss = sum(weight * mean for weight, mean in zip((0.5, 1.0, 0.7), means, strict=True))
    loss.backward()
    assert found
    for name, gradient in found.items():
        assert_close(gradient, made.parameters[name].grad, atol=1e-5, rtol=1e-3)  # other kernels


def test_weighting_by_token_is_the_mean_over_tokens_and_by_example_over_examples():
    full = BudgetSettings(choices=("1.0",))
    reports = {
        kind: trainer("random", budget=full, optim={"loss": kind}).step(0)
        for kind in ("token", "example")
    }
    examples = trainer("random").order[0]
    model = routed_model("random").eval()
    nll = []
    for example in examples:
        ids = torch.tensor([example.prompt + example.answer])
        with torch.no_grad():
            logprobs = model(ids, use_cache=False).logits[0].log_softmax(-1)
        at = range(len(example.prompt) - 1, ids.shape[1] - 1)
        nll.append([-float(logprobs[c, t]) for c, t in zip(at, example.answer, strict=True)])
    assert reports["token"].loss == pytest.approx(sum(map(sum, nll)) / sum(map(len, nll)), abs=1e-4)
    assert reports["example"].loss == pytest.approx(
        sum(sum(one) / len(one) for one in nll) / len(nll), abs=1e-4
    )


def test_a_loss_that_is_not_finite_stops_the_run_and_changes_nothing():
    made = trainer()
    made.step(0)
    before = weights(made)
    with torch.no_grad():
        made.model.backbone.blocks[0].mlp.down_proj.base_layer.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match="loss of step 2 is NaN"):
        made.step(1)
    for name, parameter in made.parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_policy_gradient_by_hand():
    by_row = torch.tensor([1.0, 3.0, 2.0, 2.0])
    log_prob = torch.tensor([-0.5, -1.0, -2.0, -3.0], requires_grad=True)
    loss = policy_gradient_loss(by_row, log_prob, 2, 2)
    # Rewards -1 and -3: advantages 1 and -1; equal rewards: none.
    assert_close(loss.item(), -(1 * -0.5 + -1 * -1.0) / 4, atol=1e-5, rtol=1e-5)
    loss.backward()
    assert_close(log_prob.grad, torch.tensor([-0.25, 0.25, 0.0, 0.0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "steps"), [("policy-gradient", 60), ("measured", 20)])
def test_plans_that_are_compared_teach_which_block_matters(method, steps):
    made = trainer(
        router={"method": method, "samples": 4, "temperature": 1.0},
        lora={"rank": 0},
        budget=BudgetSettings(choices=("4 blocks",)),
        optim={"steps": steps, "router_learning_rate": 3e-2},
    )
    with torch.no_grad():
        made.model.router.decision.up.weight.mul_(0.1)  # nearly every plan is tried at first
    before = evaluate(made.model, EXAMPLES, [4])[0][0].cross_entropy
    for step in range(steps):
        made.step(step)
    assert evaluate(made.model, EXAMPLES, [4])[0][0].cross_entropy < before - 0.05


def test_learning_rate_rises_and_falls():
    settings = OptimSettings(warmup_steps=4, schedule="linear", steps=10)
    shares = [learning_rate_share(settings, step, 10) for step in range(10)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    cosine = dataclasses.replace(settings, schedule="cosine")
    assert learning_rate_share(cosine, 7, 10) == pytest.approx(0.5)
    constant = dataclasses.replace(settings, schedule="constant")
    assert learning_rate_share(constant, 9, 10) == 1.0
    falling = dataclasses.replace(constant, decay_steps=4)
    shares = [learning_rate_share(falling, step, 10) for step in range(4, 10)]
    assert shares == [1, 1, 1, 0.75, 0.5, 0.25]
    with pytest.raises(RecipeError, match="decay_steps are of a constant rate"):
        dataclasses.replace(settings, decay_steps=4)
    with pytest.raises(RecipeError, match="decay_steps must be at most 10, the steps"):
        dataclasses.replace(constant, decay_steps=11)


def test_a_rate_that_would_fall_for_longer_than_the_run_is_refused():
    falling = {"schedule": "constant", "steps": None, "epochs": 1.0}
    assert trainer(optim={**falling, "decay_steps": 6}).rate_share(0, 0) == 1.0
    with pytest.raises(RecipeError, match=r"optim\.decay_steps must be at most 6, the steps"):
        trainer(optim={**falling, "decay_steps": 7})


def test_a_curriculum_draws_large_budgets_first():
    budgets = (3, 3, 4, 5, 6, 6)
    assert budgets_at(budgets, 0, 0) == budgets
    assert budgets_at(budgets, 0, 30) == (6, 6)
    assert budgets_at(budgets, 10, 30) == (5, 6, 6)
    assert budgets_at(budgets, 29, 30) == (4, 5, 6, 6)
    assert budgets_at(budgets, 30, 30) == budgets_at(budgets, 99, 30) == budgets
    made = trainer(budget=BudgetSettings(low="0.5", high="1.0", curriculum_steps=9))
    for step in range(12):
        assert min(made.step(step).by_budget) >= 6 - step / 3


def test_the_mean_of_weights_by_hand():
    weight = torch.tensor([1.0])
    mean = WeightMean({"one": weight}, 0.5)
    for step, value in enumerate((2.0, 4.0)):
        weight.fill_(value)
        mean.add(step)
    # At first a tenth and two elevenths are kept.
    expected = 2 / 11 * (0.1 * 1.0 + 0.9 * 2.0) + 9 / 11 * 4.0
    assert mean.values["one"].item() == pytest.approx(expected)
    mean.add(99)
    late = (expected + 4.0) / 2
    with mean.in_place():
        assert weight.item() == pytest.approx(late)
    assert (weight.item(), mean.values["one"].item()) == (4.0, pytest.approx(late))


def test_a_range_without_a_budget_is_refused():
    with pytest.raises(RecipeError, match="is above"):
        budget_range(BudgetSettings(low="0.9", high="0.6"), NUM_BLOCKS)


def test_too_few_rows_or_too_many_processes():
    with pytest.raises(RecipeError, match="24 training rows do not fill one batch of 32"):
        trainer(optim={"batch_size": 32})
    with pytest.raises(RecipeError, match="below the number of processes"):
        trainer(process=(0, 5))
