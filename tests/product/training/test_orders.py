import dataclasses
import json

import pytest
import torch

from buddy.data.examples import Example
from buddy.errors import RecipeError
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.router.orders import fit_orders
from buddy.training.router.recipe import OrderSettings, RouterSettings
from buddy.training.router.start import start_router
from tests.tiny import NUM_BLOCKS, tiny_buddy

PRIOR = torch.tensor([3.0, 2.0, 1.0, 0.0])


def rows(source, tokens, count=24):
    """Inputs of one kind: their words are its own."""
    draw = torch.Generator().manual_seed(tokens[0])
    made = []
    for length in torch.randint(3, 9, (count,), generator=draw).tolist():
        chosen = torch.randint(len(tokens), (length,), generator=draw).tolist()
        ids = tuple(tokens[at] for at in chosen)
        made.append(Example(ids, ids, source))
    return made


FIRST, SECOND = rows("first", range(2, 12)), rows("second", range(50, 60))


@pytest.fixture
def record(tmp_path):
    """Blocks leave in the order 4, 1, 3, 2; the first and the last never."""
    path = tmp_path / "order.json"
    results = {"removal_order": [4, 1, 3, 2]}
    made = {"schema": 1, "kind": "importance-sleb", "config": {}, "results": results}
    path.write_text(json.dumps(made))
    return path


def ranks(model, examples):
    """Middle blocks from the least to the most important, for each prompt."""
    decision = model.router.decision
    made = set()
    for example in examples:
        with torch.no_grad():
            scores = decision.fuse(decision(RewardModel(model).summaries([example])))[0]
        made.add(tuple((scores.argsort() + 1).tolist()))
    return made


def started(seed=5):
    model = tiny_buddy()
    assert NUM_BLOCKS == 6
    decision = model.router.decision
    decision.prior.copy_(PRIOR)
    with torch.no_grad():  # as a new router is
        decision.up.weight.zero_()
        decision.up.bias.zero_()
    start_router(model, [*FIRST, *SECOND], spread=0.0, seed=seed)
    return model


def test_each_kind_of_input_starts_from_its_own_order(record):
    model = started()
    orders = (OrderSettings(sources=("first",), record=str(record)),)
    explained = fit_orders(model, [*FIRST, *SECOND], orders, seed=5)
    assert explained > 0.9
    assert ranks(model, FIRST) == {(4, 1, 3, 2)}
    assert ranks(model, SECOND) == {(4, 3, 2, 1)}, "a source that is not named keeps the prior"


def test_the_same_seed_fits_the_same_router(record):
    orders = (OrderSettings(sources=("first",), record=str(record)),)
    models = [started(), started()]
    for model in models:
        fit_orders(model, [*FIRST, *SECOND], orders, seed=5)
    one, other = (model.router.decision.state_dict() for model in models)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_source_without_rows_is_refused(record):
    orders = (OrderSettings(sources=("third",), record=str(record)),)
    with pytest.raises(RecipeError, match=r"no training row is of source 'third'.*first, second"):
        fit_orders(started(), [*FIRST, *SECOND], orders, seed=5)


def test_orders_need_standardised_inputs():
    order = OrderSettings(sources=("first",), record="any.json")
    planner = dataclasses.replace(RouterSettings().planner, pool="scores")
    for settings in ({"spread": 0.1}, {"planner": planner}):
        with pytest.raises(RecipeError, match="orders go with neither"):
            RouterSettings(orders=(order,), **settings)


def test_orders_need_a_router():
    order = OrderSettings(sources=("first",), record="order.json")
    with pytest.raises(RecipeError, match=r"policy 'random' has none: leave them out"):
        RouterSettings(orders=(order,), policy="random")


def test_a_prompt_between_two_kinds_gets_scores_between(record):
    model = started()
    orders = (OrderSettings(sources=("first",), record=str(record)),)
    fit_orders(model, [*FIRST, *SECOND], orders, seed=5)
    prompts, decision = RewardModel(model), model.router.decision
    with torch.no_grad():
        one, other = (prompts.summaries([rows[0]]) for rows in (FIRST, SECOND))
        path = torch.linspace(0, 1, 101)[:, None]
        scores = decision(torch.lerp(one, other, path))
    yes, no = scores[0], scores[-1]
    assert torch.allclose(no, torch.zeros_like(no), atol=1e-4), "the prior, and nothing added"
    share = ((scores - no) @ (yes - no)) / (yes - no).square().sum()
    assert ((share > -0.05) & (share < 1.05)).all()
    assert ((share > 0.1) & (share < 0.9)).any()


def test_three_kinds_of_input_are_told_apart(record, tmp_path):
    third = rows("third", range(80, 90))
    other = tmp_path / "other.json"
    other.write_text(record.read_text().replace("[4, 1, 3, 2]", "[2, 3, 1, 4]"))
    model = started()
    orders = (
        OrderSettings(sources=("first",), record=str(record)),
        OrderSettings(sources=("third",), record=str(other)),
    )
    assert fit_orders(model, [*FIRST, *SECOND, *third], orders, seed=5) == 1.0
    assert ranks(model, FIRST) == {(4, 1, 3, 2)}
    assert ranks(model, SECOND) == {(4, 3, 2, 1)}
    assert ranks(model, third) == {(2, 3, 1, 4)}


def test_a_source_follows_one_order():
    order = OrderSettings(sources=("first", "second"), record="order.json")
    with pytest.raises(RecipeError, match="source 'first' is named twice"):
        RouterSettings(orders=(order, OrderSettings(sources=("first",), record="other.json")))


def test_a_decision_module_too_narrow_for_its_orders_is_refused():
    orders = tuple(OrderSettings(sources=(f"source {n}",), record="x.json") for n in range(17))
    with pytest.raises(RecipeError, match="rank is 32: expected two for each of the 17 orders"):
        RouterSettings(orders=orders)
