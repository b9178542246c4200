"""What a step minimises, against plain formulas, and the teacher beside it."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from buddy.backbone.backbone import Backbone
from buddy.data.examples import Source
from buddy.errors import RecipeError
from buddy.methods.gated.recipe import GatedRecipe, GateSettings
from buddy.methods.layerskip.recipe import LayerSkipRecipe
from buddy.training import losses as losses_module
from buddy.training.batches import collate
from buddy.training.losses import Teaching, answer_losses, weighted_losses
from buddy.training.recipe import DataSettings
from buddy.training.router.objective import Spots, find_spots
from buddy.training.router.recipe import OptimSettings, TeacherSettings
from buddy.training.router.teacher import teacher_pass
from tests.product.training.examples import random_examples
from tests.tiny import all_families, random_ids, tiny_buddy, tiny_model

EXAMPLES = random_examples(4)
NO_TEACHER = TeacherSettings()
DASH = partial(GatedRecipe, method="dash", gates=GateSettings(penalty=1.0))
BY_ROW = torch.tensor([0.1, 0.2, 0.3, 0.4])


def random_spots(count, taught):
    torch.manual_seed(1)
    return Spots(
        rows=torch.arange(count),
        columns=torch.arange(count),
        targets=random_ids(1, count)[0],
        data=torch.rand(count),
        teacher=torch.rand(taught),
        is_answer=torch.ones(count, dtype=torch.bool),
    )


def objective(backbone, hidden, spots, taught, teacher):
    """By position, a few at a time; and the data's losses."""
    teaching = Teaching(taught, spots.teacher, teacher)
    return weighted_losses(backbone, hidden, spots.targets, spots.data, teaching)


def plain(backbone, hidden, spots, taught, teacher):
    """The formula, with all logits at once."""
    log_probs = backbone.logits(hidden).log_softmax(1)
    losses = -log_probs.gather(1, spots.targets[:, None])[:, 0]
    first = len(spots.teacher)
    cross = -(teacher.logits(taught).softmax(1) * log_probs[:first]).sum(1)
    weighted = spots.data * losses
    return torch.cat([weighted[:first] + spots.teacher * cross, weighted[first:]]), losses


@all_families
def test_values_and_gradients_equal_the_plain_formula(family, monkeypatch):
    monkeypatch.setattr(losses_module, "HEAD_TOKENS", 3)  # several pieces, the last ones short
    backbone = Backbone(tiny_model(family).requires_grad_(False))
    teacher = Backbone(tiny_model(family, seed=5).requires_grad_(False))
    spots = random_spots(9, 5)
    hidden, taught = torch.randn(9, 32, requires_grad=True), torch.randn(5, 32)
    later = torch.rand(9)  # weights that come after, as those of a mean by row
    found, losses = objective(backbone, hidden, spots, taught, teacher)
    (later * found).sum().backward()
    mine, hidden.grad = hidden.grad, None
    expected, by_spot = plain(backbone, hidden, spots, taught, teacher)
    (later * expected).sum().backward()
    # All are float32 sums over 97 logits, in another order.
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_close(losses, by_spot, atol=1e-5, rtol=1e-5)
    assert_close(mine, hidden.grad, atol=1e-5, rtol=1e-4)
    assert not losses.requires_grad
    assert_close(answer_losses(backbone, hidden, spots.targets), losses, atol=1e-5, rtol=1e-5)


def test_the_gradient_is_that_of_finite_differences():
    backbone = Backbone(tiny_model().double().requires_grad_(False))
    teacher = Backbone(tiny_model(seed=5).double().requires_grad_(False))
    spots = random_spots(4, 3)
    hidden, taught = torch.randn(4, 32).double(), torch.randn(3, 32).double()

    def value(at):
        return objective(backbone, at, spots, taught, teacher)[0].sum().item()

    hidden.requires_grad_()
    objective(backbone, hidden, spots, taught, teacher)[0].sum().backward()
    base, step = hidden.detach(), 1e-2
    for spot in range(4):
        for place in (0, 17, 31):
            nudge = torch.zeros_like(base)
            nudge[spot, place] = step
            slope = (value(base + nudge) - value(base - nudge)) / (2 * step)
            # The final norm is in float32, so a smaller step would measure its rounding.
            assert hidden.grad[spot, place].item() == pytest.approx(slope, abs=1e-4, rel=1e-3)


def test_a_model_that_agrees_with_its_teacher_learns_nothing_from_it():
    backbone = Backbone(tiny_model().requires_grad_(False))
    spots = dataclasses.replace(random_spots(6, 6), data=torch.zeros(6))
    hidden = torch.randn(6, 32, requires_grad=True)
    found, _ = objective(backbone, hidden, spots, hidden.detach(), backbone)
    found.sum().backward()
    assert found.min().item() > 0  # the entropy
    assert_close(hidden.grad, torch.zeros_like(hidden), atol=1e-7, rtol=0)


def spots_of(*, examples=EXAMPLES, prompt_loss=0.0, teacher=NO_TEACHER, places=range(4), seed=3):
    places = list(places)
    return find_spots(
        collate([examples[place] for place in places]),
        BY_ROW[places],
        examples,
        prompt_loss=prompt_loss,
        teacher=teacher,
        places=places,
        seed=seed,
    )


def test_answers_alone_have_the_weights_of_their_rows():
    spots, batch = spots_of(), collate(EXAMPLES)
    assert torch.equal(spots.rows, batch.rows)
    assert torch.equal(spots.columns, batch.columns)
    assert torch.equal(spots.targets, batch.targets)
    assert len(spots.teacher) == 0
    assert spots.is_answer.all()
    by_row = torch.zeros(4).index_add(0, spots.rows, spots.data)
    assert_close(by_row, BY_ROW)


def test_prompts_and_the_teacher_have_the_weights_that_the_recipe_says():
    teacher = TeacherSettings(name="any", weight=0.7)
    spots = spots_of(prompt_loss=0.5, teacher=teacher)
    tokens = sum(one.num_tokens - 1 for one in EXAMPLES)
    assert len(spots.rows) == len(spots.teacher) == tokens  # each predicted token, and no pad
    assert spots.data[~spots.is_answer].sum().item() == pytest.approx(0.5)
    assert spots.data[spots.is_answer].sum().item() == pytest.approx(1.0)
    assert spots.teacher.sum().item() == pytest.approx(0.7)
    for spot in range(tokens):
        example = EXAMPLES[spots.rows[spot]]
        ids = example.prompt + example.answer
        assert spots.targets[spot] == ids[spots.columns[spot] + 1]
        assert spots.is_answer[spot] == (spots.columns[spot] >= len(example.prompt) - 1)
    answers = spots_of(teacher=dataclasses.replace(teacher, tokens="answers"))
    assert answers.is_answer.all()
    assert answers.teacher.sum().item() == pytest.approx(0.7)


def test_a_share_of_the_tokens_weighs_as_much_as_all_and_answers_keep_their_own_loss():
    many = random_examples(4, longest=200)
    teacher = TeacherSettings(name="any", share=0.5)
    spots = spots_of(examples=many, teacher=teacher)
    assert spots.teacher.sum().item() == pytest.approx(1.0, abs=0.2)  # of several hundred draws
    assert int(spots.is_answer.sum()) == sum(len(one.answer) for one in many)
    assert not torch.equal(
        spots.rows, spots_of(examples=many, teacher=teacher, seed=4).rows
    )  # drawn anew


def test_two_processes_have_the_spots_of_one():
    settings = {"prompt_loss": 0.5, "teacher": TeacherSettings(name="any", share=0.5)}
    whole = spots_of(**settings)
    found = set()
    for places in ((0, 2), (1, 3)):
        part = spots_of(places=places, **settings)
        teacher = torch.cat([part.teacher, torch.zeros(len(part.rows) - len(part.teacher))])
        columns = (part.columns, part.targets, part.data, teacher)
        rows = [places[row] for row in part.rows]
        found |= set(zip(rows, *(one.tolist() for one in columns), strict=True))
    teacher = torch.cat([whole.teacher, torch.zeros(len(whole.rows) - len(whole.teacher))])
    columns = (whole.rows, whole.columns, whole.targets, whole.data, teacher)
    assert found == set(zip(*(one.tolist() for one in columns), strict=True))


def test_the_teacher_runs_every_block():
    teacher = tiny_buddy("qwen3")
    batch = collate(EXAMPLES)
    found = teacher_pass(teacher, batch)
    logits = teacher.backbone.logits(found)
    expected = teacher.model(batch.token_ids).logits
    real = (
        torch.arange(batch.token_ids.shape[1])
        < torch.tensor([one.num_tokens for one in EXAMPLES])[:, None]
    )
    assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-4)  # another attention kernel


def test_settings_without_a_teacher_are_refused():
    with pytest.raises(RecipeError, match="teacher has no name"):
        TeacherSettings(weight=0.5)


@pytest.mark.parametrize("kind", [LayerSkipRecipe, DASH])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"teacher": TeacherSettings(name="any")}, "is trained without one: leave the table out"),
        ({"optim": OptimSettings(prompt_loss=0.5)}, "is trained on answers alone"),
    ],
)
def test_methods_with_an_objective_of_their_own_refuse_another(kind, settings, says):
    data = DataSettings(train=(Source(path="unused"),))
    with pytest.raises(RecipeError, match=says):
        kind(data=data, **settings)
