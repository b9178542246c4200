"""Several budgets of one example in a step, and the student at full depth as its own teacher."""

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import RecipeError
from buddy.training.router.recipe import BudgetSettings
from tests.product.training.test_joint import recipe, trainer

RANGE = {"low": "0.5", "high": "1.0"}


def test_an_example_runs_once_under_each_of_its_budgets():
    made = trainer("random", budget=BudgetSettings(each=3, **RANGE))
    rows = made._backward(made.order[0], seed=5, step=0)
    assert len(rows) == 12
    assert sum(weight for *_, weight in rows) == pytest.approx(1)
    drawn = [blocks for _, blocks, *_ in rows]
    assert any(len(set(drawn[at : at + 3])) > 1 for at in range(0, 12, 3))
    assert all(len(plan) == blocks for _, blocks, plan, _ in rows)


def test_a_sandwich_has_the_largest_and_the_smallest_of_every_example():
    made = trainer("random", budget=BudgetSettings(each=3, sandwich=True, **RANGE))
    middle = set()
    for step in range(4):
        drawn = [blocks for _, blocks, *_ in made._backward(made.order[step], step, step)]
        assert drawn[0::3] == [6] * 4
        assert drawn[1::3] == [3] * 4
        middle |= set(drawn[2::3])
    assert middle > {4}


def test_the_gradient_is_the_mean_of_those_at_each_budget():
    ends = BudgetSettings(each=2, sandwich=True, **RANGE)
    both = trainer("static:3,2,4,1", budget=ends)
    both._backward(both.order[0], seed=5, step=0)
    parts = []
    for blocks in (6, 3):
        alone = BudgetSettings(choices=(f"{blocks} blocks",))
        made = trainer("static:3,2,4,1", budget=alone)
        made._backward(made.order[0], seed=5, step=0)
        parts.append(made.parameters)
    for name, parameter in both.parameters.items():
        found = [part[name].grad for part in parts]
        mean = sum(torch.zeros_like(parameter) if g is None else g for g in found) / 2
        assert_close(parameter.grad, mean, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": {"sandwich": True}}, "each is 1: set each to 2 or more"),
        (
            {"budget": {"each": 2}, "router": {"method": "measured"}},
            r"set budget\.each to 1, or router\.method",
        ),
        (
            {"teacher": {"name": "self"}, "optim": {"fsdp": True}},
            r"teacher\.name self runs others",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        recipe(**settings | {"budget": BudgetSettings(**settings.get("budget", {}))})


def test_its_own_teacher_is_the_student_at_full_depth():
    taught = {"name": "self", "weight": 0.7}
    half = BudgetSettings(choices=("3 blocks",))
    made = trainer("static:3,2,4,1", budget=half, teacher=taught, lora={"rank": 4, "dropout": 0.0})
    for parameter in made.parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)  # the teacher is not the base model
    examples = made.order[0]
    made._backward(examples, seed=5, step=0)
    found = {name: p.grad.clone() for name, p in made.parameters.items() if p.grad is not None}
    made.optimizer.zero_grad()
    answers, said = [], []
    for example in examples:
        ids = torch.tensor([example.prompt + example.answer])
        log_probs = (
            made.model(ids, budget="3 blocks", use_cache=False).logits[0, :-1].log_softmax(1)
        )
        with torch.no_grad():
            wanted = made.model(ids, budget="1.0", use_cache=False).logits[0, :-1].softmax(1)
        answers.append(-log_probs.gather(1, ids[0, 1:, None])[len(example.prompt) - 1 :, 0])
        said.append(-(wanted * log_probs).sum(1))
    (torch.cat(answers).mean() + 0.7 * torch.cat(said).mean()).backward()
    assert not torch.allclose(wanted, log_probs.exp(), atol=0.01)
    for name, gradient in found.items():
        assert_close(gradient, made.parameters[name].grad, atol=1e-5, rtol=1e-3)  # other kernels
