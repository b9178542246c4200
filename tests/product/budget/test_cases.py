"""Each form of a budget has one reading, wherever it is written, and each wrong one a refusal."""

import pytest

from buddy.budget.request import read_budget
from buddy.budget.resolved import Limits
from buddy.errors import BudgetError
from buddy.serving.http.budget_rules import BudgetRules, split_model
from tests.budget_cases import CASES, MARKS, REFUSED, SETTINGS, names

LIMITS = Limits(
    num_blocks=30, least=12, has_predictor=True, means=(15, 30), find_marks=lambda: MARKS
)
RULES = BudgetRules(
    num_blocks=SETTINGS["num_blocks"],
    has_predictor=True,
    means=tuple(SETTINGS["means"]),
    min_budget=SETTINGS["min_budget"],
    efforts=SETTINGS["efforts"],
    find_marks=lambda: MARKS,
)


def reading(resolve):
    """What a case says of a budget, or that it is refused in a line."""
    message = None
    try:
        budget = resolve()
    except BudgetError as error:
        message = str(error)
    if message is not None:
        assert "\n" not in message
        assert len(message) < 400
        return REFUSED
    read = {
        "kind": budget.kind,
        "prompt": budget.prompt,
        "least": budget.least,
        "most": budget.most,
    }
    if budget.think is not None:
        read["think"] = budget.think
    if budget.mean is not None:
        read["mean"] = str(budget.mean)
    return {**read, "ms_per_token": budget.ms_per_token} if budget.has_deadline else read


def test_the_table_has_every_form():
    kinds = [case["product"] for case in CASES]
    read = [kind["kind"] for kind in kinds if kind != REFUSED]
    assert len(CASES) >= 60
    assert set(read) == {"fixed", "mean", "auto", "deadline", "default"}
    assert kinds.count(REFUSED) >= 60


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_a_request_has_the_budget_that_the_table_says(case):
    request = case["request"]
    _, suffix = split_model(request.get("model", SETTINGS["model"]), SETTINGS["model"])
    effort = request.get("reasoning_effort")
    assert reading(lambda: RULES.read(request.get("budget"), suffix, effort)) == case["product"]


WRITTEN = [case for case in CASES if set(case["request"]) == {"budget"}]


@pytest.mark.parametrize("case", WRITTEN, ids=names(WRITTEN))
def test_python_and_the_command_line_read_the_same(case):
    value = case["request"]["budget"]
    assert reading(lambda: read_budget(value).resolve(LIMITS)) == case["product"]
