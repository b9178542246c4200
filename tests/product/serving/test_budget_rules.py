"""Every form of a budget becomes its wish, and every wrong one ends in one line."""

from fractions import Fraction

import pytest

from buddy.budget.request import read_budget
from buddy.errors import BudgetError
from buddy.serving.http.budget_rules import BudgetRules, parse_efforts, split_model
from tests.budgets import auto, deadline, default, fixed, on_average

RULES = BudgetRules(num_blocks=30, has_predictor=True, means=(15, 30), min_budget="12 blocks")


@pytest.mark.parametrize(
    ("budget", "wish"),
    [
        (0.6, fixed(prefill=18, decode=18)),
        (1, fixed(prefill=30, decode=30)),
        ("60%", fixed(prefill=18, decode=18)),
        ("0.55", fixed(prefill=16, decode=16)),
        ("18 blocks", fixed(prefill=18, decode=18)),
        ("auto", auto(least=12, most=30)),
        ({"prefill": 1.0, "decode": 0.5}, fixed(prefill=30, decode=15)),
        ({"prefill": "24 blocks", "decode": "50%"}, fixed(prefill=24, decode=15)),
        ({"prefill": 0.9, "decode": 0.5, "min": 0.5, "max": 0.9}, fixed(prefill=27, decode=15)),
        ({"mean": 0.7}, on_average(prefill=21, decode=21, mean=Fraction(21))),
        ({"mean": "75%", "prefill": 1.0}, on_average(prefill=30, decode=23, mean=Fraction(45, 2))),
        ("mean:20 blocks", on_average(prefill=20, decode=20, mean=Fraction(20))),
        ({"ms_per_token": 12}, deadline(ms_per_token=12.0, least=12, most=30)),
        ({"tokens_per_s": 80}, deadline(ms_per_token=12.5, least=12, most=30)),
        (
            {"ms_per_token": 12.5, "min": 0.5, "max": "24 blocks"},
            deadline(ms_per_token=12.5, least=15, most=24),
        ),
        # The operator's smallest budget holds, but not against what the client allows at most.
        ({"tokens_per_s": 10, "min": 0.2}, deadline(ms_per_token=100.0, least=12, most=30)),
        ({"tokens_per_s": 10, "max": 0.3}, deadline(ms_per_token=100.0, least=9, most=9)),
    ],
)
def test_each_form_has_its_wish(budget, wish):
    assert RULES.read(budget, None, None) == wish


WRONG = [
    (0, "budget 0 is not allowed"),
    (-1, "budget -1 is not allowed"),
    (1.5, "budget 1.5 is not allowed"),
    (18, 'for a count write "18 blocks"'),
    (1e300, "is not allowed"),
    (True, "cannot be read"),
    ("", "cannot be read"),
    ("much", "cannot be read"),
    ("99 blocks", "outside what this model can run"),
    (0.01, "rounds to 0"),
    ([0.6], "cannot be read"),
    ({}, "cannot be read"),
    ({"ms": 12}, "cannot be read: expected a fraction"),
    ({"prefill": 0.5}, "cannot be read"),
    ({"ms_per_token": 12, "tokens_per_s": 80}, "cannot be read"),
    ({"ms_per_token": 12, "often": 1}, "cannot be read"),
    ({"min": 0.5}, "cannot be read"),
    ({"prefill": "auto", "decode": 0.5}, "budget.prefill must be a fraction or a count"),
    ({"prefill": 0.5, "decode": None}, "cannot be read"),
    ({"prefill": 0.5, "decode": 0.5, "max": 0.4}, "outside its own min and max"),
    ({"ms_per_token": 0}, "must be a number from"),
    ({"ms_per_token": -3}, "must be a number from"),
    ({"ms_per_token": "12"}, "must be a number from"),
    ({"ms_per_token": True}, "must be a number from"),
    ({"ms_per_token": float("inf")}, "must be a number from"),
    ({"ms_per_token": float("nan")}, "must be a number from"),
    ({"tokens_per_s": 0}, "must be a number from"),
    ({"ms_per_token": 12, "min": "auto"}, "budget.min must be a fraction or a count"),
    ({"ms_per_token": 12, "min": 0.9, "max": 0.5}, "is above budget.max"),
    ({"mean": 0.3}, "a mean of 9 blocks a token is outside what this model's ledger spends"),
    ({"mean": "auto"}, "name a mean such as mean:0.7"),
    ({"mean": 0.6, "min": 0.5}, "cannot be read"),
    ({"mean": 0.6, "prefill": "auto"}, "budget.prefill must be a fraction or a count"),
]


@pytest.mark.parametrize(("budget", "said"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_what_is_no_budget_is_refused_in_one_line(budget, said):
    with pytest.raises(BudgetError) as refused:
        RULES.read(budget, None, None)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_explicit_budget_goes_before_the_name_and_the_name_before_the_effort():
    rules = BudgetRules(
        num_blocks=30, has_predictor=False, default="0.8", efforts={"low": "0.5", "high": "1.0"}
    )
    assert rules.read(0.6, "0.7", "low") == fixed(prefill=18, decode=18)
    assert rules.read(None, "0.7", "low") == fixed(prefill=21, decode=21)
    assert rules.read(None, None, "low") == fixed(prefill=15, decode=15)
    assert rules.read(None, None, None) == default(least=3, most=24)
    assert BudgetRules(num_blocks=30, has_predictor=False).read(None, None, "low") == default(
        least=3, most=30
    )


def test_what_goes_before_does_not_excuse_what_is_wrong():
    rules = BudgetRules(num_blocks=30, has_predictor=False, efforts={"low": "0.5"})
    with pytest.raises(BudgetError, match="cannot be read"):
        rules.read(0.6, "much", None)
    with pytest.raises(BudgetError, match="'high' has no budget here: expected low"):
        rules.read(0.6, None, "high")


def test_auto_needs_a_predictor_wherever_it_is_written():
    rules = BudgetRules(num_blocks=30, has_predictor=False)
    for named in [("auto", None), (None, "auto")]:
        with pytest.raises(BudgetError, match="needs a trained Budget Predictor"):
            rules.read(*named, None)
    with pytest.raises(BudgetError, match="needs a trained Budget Predictor"):
        BudgetRules(num_blocks=30, has_predictor=False, default="auto")
    with pytest.raises(BudgetError, match="needs a trained Budget Predictor"):
        BudgetRules(num_blocks=30, has_predictor=False, efforts={"low": "auto"})
    with pytest.raises(BudgetError, match="no client asks for effort 'lazy'"):
        BudgetRules(num_blocks=30, has_predictor=False, efforts={"lazy": "0.5"})


@pytest.mark.parametrize("min_budget", [None, "12 blocks"])
def test_nothing_elastic_goes_below_what_the_policy_always_runs(min_budget):
    rules = BudgetRules(num_blocks=30, has_predictor=True, num_pinned=20, min_budget=min_budget)
    assert rules.read(None, None, None) == default(least=20, most=30)
    assert rules.read("auto", None, None) == auto(least=20, most=30)
    assert rules.read({"ms_per_token": 9, "min": 0.5}, None, None).least == 20


@pytest.mark.parametrize(
    "own", [{"default": "12 blocks"}, {"default": "mean:0.5"}, {"efforts": {"low": "12 blocks"}}]
)
def test_a_servers_own_budget_below_what_the_policy_always_runs_is_refused_at_the_start(own):
    def rules(num_pinned):
        return BudgetRules(
            num_blocks=30, has_predictor=False, means=(12, 30), num_pinned=num_pinned, **own
        )

    assert rules(12)
    with pytest.raises(BudgetError, match="cannot be spent: 20 of the 30 blocks always run"):
        rules(20)


def test_a_name_may_have_a_budget_after_its_last_at():
    assert split_model("tiny", "tiny") == ("tiny", None)
    assert split_model("tiny@0.6", "tiny") == ("tiny", "0.6")
    assert split_model("a@b", "a@b") == ("a@b", None)
    assert split_model("a@b@18 blocks", "a@b") == ("a@b", "18 blocks")


def test_efforts_are_read_each_once():
    assert parse_efforts("low=0.5, high = 24 blocks") == {
        "low": read_budget("0.5"),
        "high": read_budget("24 blocks"),
    }
    for wrong in ["", "low", "low=", "=0.5", "low=0.5,low=0.6", "low=0.5,"]:
        with pytest.raises(BudgetError, match="cannot be read: expected such as"):
            parse_efforts(wrong)


def test_a_mean_needs_a_ledger_and_may_be_the_default():
    plain = BudgetRules(num_blocks=30, has_predictor=False)
    with pytest.raises(BudgetError, match="needs a ledger"):
        plain.read({"mean": 0.7}, None, None)
    rules = BudgetRules(num_blocks=30, has_predictor=False, means=(15, 30), default="mean:0.8")
    assert rules.read(None, None, None) == on_average(prefill=24, decode=24, mean=Fraction(24))
    assert rules.read(None, "mean:0.7", None).mean == 21
