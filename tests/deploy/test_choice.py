"""The recipe for replicas: a request's budget says which server is asked; nothing is refused."""

import random

import pytest

from buddy.budget.request import read_budget
from buddy.errors import BudgetError
from buddy.serving.http.budget_rules import BudgetRules, split_model
from tests.budget_cases import CASES, MARKS, REFUSED
from tests.budget_cases import names as names_of
from tests.deploy.recipe import FOLDER, load

recipe = load()
L = 30


@pytest.mark.parametrize("num_blocks", [6, 30, 80])
def test_a_budget_is_read_as_the_server_reads_it(num_blocks):
    draw = random.Random(0)
    written = ["60%", " 18 blocks ", "1 BLOCK", "7blocks", ".5", "0.55", "5.%", 1, 1.0, "1", 0.55]
    written += [round(draw.uniform(0, 1.1), draw.randrange(1, 6)) for _ in range(200)]
    written += [f"{draw.randrange(200)} blocks" for _ in range(50)]
    written += ["auto", "", "much", "0.6 0.6", -0.5, 0, True, float("nan"), 1e999]
    read = 0
    for one in written:
        try:
            theirs = read_budget(one)
            blocks = None if theirs.number is None else theirs.number.blocks(num_blocks)
        except BudgetError:
            continue  # the server refuses it, whichever it is
        ours = recipe.blocks_of(one, num_blocks)
        assert ours == blocks, one
        read += 1
    assert read > 100
    wrong = [*written[-8:], None, [0.5], {}]
    assert {recipe.blocks_of(one, num_blocks) for one in wrong} == {None}


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        ({"budget": 0.6}, 18),
        ({"budget": "18 blocks", "model": "m@0.3"}, 18),
        ({"budget": {"prefill": 1.0, "decode": 0.5}}, 30),
        ({"budget": {"prefill": 0.4, "decode": "60%"}}, 18),
        ({"budget": {"prompt": 0.4, "think": 0.8, "answer": 0.6}}, 24),
        ({"model": "m@prompt:0.4,think:0.8,answer:0.6"}, 24),
        ({"budget": {"mean": 0.6, "prompt": 1.0}}, 30),
        ({"budget": {"ms_per_token": 12, "max": 0.8}}, 24),
        ({"budget": {"mean": 0.6}}, 18),
        ({"budget": {"mean": 0.6, "prefill": 1.0}}, 30),
        ({"model": "smollm2-135m-buddy@mean:0.6"}, 18),
        ({"budget": {"ms_per_token": 12}}, None),
        ({"vllm_xargs": {"budget": 0.6}}, 18),
        ({"vllm_xargs": {"budget": "auto"}}, None),
        ({"model": "smollm2-135m-buddy@0.6"}, 18),
        ({"model": "smollm2-135m-buddy"}, None),
        ({"budget": "auto"}, None),
        ({}, None),
        # What is wrong goes to the server that says so.
        ({"budget": 4}, None),
        ({"budget": {"prefill": 0.4, "decode": []}}, None),
        ({"vllm_xargs": 3}, None),
        ([1], None),
        (None, None),
        ("text", None),
    ],
)
def test_a_request_says_how_deep_it_may_run_at_most(body, blocks):
    assert recipe.asked_blocks(body, L) == blocks
    budget = body.get("budget") if isinstance(body, dict) else None
    if blocks is not None and "vllm_xargs" not in body:
        _, suffix = split_model(body.get("model", "m"), "m")
        rules = BudgetRules(
            num_blocks=L, has_predictor=True, means=(15, L), find_marks=lambda: MARKS
        )
        budget = rules.read(budget, suffix, None)
        most = max(budget.depths()) if budget.is_contract else budget.most
        assert most == blocks


@pytest.mark.parametrize("case", CASES, ids=names_of(CASES))
def test_it_is_read_as_the_server_reads_it_or_goes_to_the_deepest(case):
    blocks, read = recipe.asked_blocks(case["request"], L), case["product"]
    assert blocks == case["replicas"]
    if read != REFUSED and blocks is not None:
        deepest = max(read["prompt"], read["most"], read.get("think", 0))
        assert blocks == deepest or (read["kind"] == "mean" and blocks == deepest - 1)


def places(*blocks):
    return [recipe.Place(f"{at}:{one}", one, is_ready=True) for at, one in enumerate(blocks)]


def names(found):
    return [one.name for one in found]


def test_the_smallest_class_with_room_comes_first_then_deeper_then_shallower():
    made = places(10, 20, 30)
    assert names(recipe.ranked(made, 9)) == ["0:10", "1:20", "2:30"]
    assert names(recipe.ranked(made, 10)) == ["0:10", "1:20", "2:30"]
    assert names(recipe.ranked(made, 11)) == ["1:20", "2:30", "0:10"]
    assert names(recipe.ranked(made, 25)) == ["2:30", "1:20", "0:10"]
    assert names(recipe.ranked(made, None)) == ["2:30", "1:20", "0:10"]
    assert names(recipe.ranked(made, 99)) == ["2:30", "1:20", "0:10"]


def test_within_a_class_the_least_busy_comes_first_and_who_is_not_ready_does_not_come():
    made = places(10, 30, 30, 30, 30)
    for one, busy in zip(made, (0, 3, 1, 2, 0), strict=True):
        one.in_flight = busy
    made[4].is_ready = False
    made[2].is_out = True
    assert names(recipe.ranked(made, 30)) == ["3:30", "1:30", "0:10"]
    assert recipe.ranked([], 30) == []


def test_the_shipped_configurations_can_be_read():
    for name in ("buddy.toml", "vllm.toml"):
        config = recipe.Config.read(FOLDER / name)
        assert list(config.classes.values()) == [int(0.6 * config.num_blocks), config.num_blocks]
        for one in config.replica:
            assert "{port}" in one.command
            assert one.command[1] == "serve"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_blocks = 6", "a deployment needs replicas with a name each, got none"),
        ("num_blocks = 6\nhots = 1", "unknown key 'hots': expected some of drain_s"),
        ("[[replica]]\nname = 'a'", "replica is not complete"),
        (
            "num_blocks = 6\n[[replica]]\nname='a'\nport=1\nbudget='much'\ncommand=[]",
            "the budget of replica a cannot be read",
        ),
        (
            "num_blocks = 6\n" + 2 * "[[replica]]\nname='a'\nport=1\nbudget=1\ncommand=[]\n",
            "got ['a']",
        ),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path, text, said):
    path = tmp_path / "made.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as raised:
        recipe.Config.read(path)
    assert said in str(raised.value)
