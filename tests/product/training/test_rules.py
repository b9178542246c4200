"""Rules beside a predictor choose what slow references choose, and gains are paired by prompt."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from buddy.errors import PolicyError, TrainingError
from buddy.routing.measured_constant import MeasuredConstant
from buddy.training.predictor.evaluation import evaluate_predictor
from buddy.training.predictor.grpo import GRPOSettings
from buddy.training.predictor.loss_table import LossTable
from buddy.training.predictor.rules import PENALTIES, Rules, rewards_by_depth, ridge
from tests.product.training.made import examples
from tests.product.training.test_predictor_trainer import new_predictor

SETTINGS = GRPOSettings(lambda_perf=1.0, lambda_cost=0.6)
HARD, EASY = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.ones(4)


def table(is_hard, sources, *, seed=0, summaries=None):
    """Easy prompts want 3 of 6 blocks, hard ones 6; summaries tell them apart if not given."""
    rows = [
        replace(row, source=source)
        for row, source in zip(examples(len(sources), seed=seed), sources, strict=True)
    ]
    is_hard = torch.tensor(is_hard)
    own = torch.where(is_hard, 1.0, -1.0)[:, None].repeat(1, 2)
    return LossTable(
        rows,
        own if summaries is None else summaries,
        torch.where(is_hard[:, None], HARD, EASY),
    )


def test_a_ridge_regression_takes_the_penalty_that_predicts_rows_left_out_best():
    torch.manual_seed(0)
    inputs = torch.randn(20, 6, dtype=torch.float64)
    inputs -= inputs.mean(0)
    targets = inputs @ torch.randn(6, 3, dtype=torch.float64)
    targets += 3 * torch.randn(20, 3, dtype=torch.float64)
    targets -= targets.mean(0)

    def solve(x, y, penalty):
        return torch.linalg.solve(x.T @ x + penalty * torch.eye(6, dtype=x.dtype), x.T @ y)

    def left_out(penalty):
        """Each row is predicted by a fit to all others, whose mean is fitted with the rest."""
        total = 0.0
        for row in range(20):
            kept = [other for other in range(20) if other != row]
            x = torch.cat([inputs[kept], torch.ones(19, 1, dtype=torch.float64)], 1)
            penalties = torch.diag(torch.tensor([penalty] * 6 + [0.0], dtype=torch.float64))
            fit = torch.linalg.solve(x.T @ x + penalties, x.T @ targets[kept])
            total += float((targets[row] - inputs[row] @ fit[:6] - fit[6]).square().sum())
        return total

    best = min(PENALTIES, key=left_out)
    assert PENALTIES[0] < best < PENALTIES[-1]
    assert_close(ridge(inputs, targets), solve(inputs, targets, best))


def test_every_rule_chooses_what_its_training_rows_say():
    train = table([True] * 3 + [False] * 3 + [True, False], ["a"] * 3 + ["b"] * 3 + ["c"] * 2)
    rules = Rules(train, SETTINGS, 3)
    # By hand, means over half hard, half easy: 3 blocks -2.5 - 0.3, 6 blocks -1 - 0.6.
    assert rules.blocks == 6
    assert rules.blocks_by_source == {"a": 6, "b": 3, "c": 6}
    test = table([True, False, False, True], ["b", "a", "c", "new"], seed=1)
    chosen = {name: choose(test).tolist() for name, choose in rules.choose.items()}
    assert chosen["constant"] == [6] * 4
    assert chosen["constant by source"] == [3, 6, 6, 6]  # of a source that is new, the constant
    assert chosen["ridge"] == [6, 3, 3, 6]
    flat = Rules(table([True, False] * 4, ["a"] * 8, summaries=torch.ones(8, 2)), SETTINGS, 3)
    assert flat.choose["ridge"](test).tolist() == [6] * 4


def test_the_length_of_a_prompt_chooses_where_it_tells_hard_from_easy():
    rows = [row for row in examples(48) if len(row.prompt) in (3, 8)]
    is_long = torch.tensor([len(row.prompt) == 8 for row in rows])
    losses = torch.where(is_long[:, None], HARD, EASY)
    train = LossTable(rows, torch.zeros(len(rows), 2), losses)
    rules = Rules(train, SETTINGS, 3)
    assert rules.choose["prompt length"](train).tolist() == (3 + 3 * is_long).tolist()
    assert rules.choose["ridge"](train).tolist() == [6] * len(rows)


def test_gains_are_paired_by_prompt_and_source():
    train = table([True, True, False, False], ["a", "a", "b", "b"])
    rules = Rules(train, SETTINGS, 3)
    test = table([True, False, False, True], ["a", "a", "b", "b"], seed=1)
    found = rules.compare(test, torch.tensor([6, 3, 6, 3]))
    worth = rewards_by_depth(test, SETTINGS, 3)
    assert_close(worth[0], torch.tensor([-4.3, -3.4, -2.5, -1.6]))
    # Ours -1.6, -1.3, -1.6, -4.3; the constant 6 blocks, -1.6 each: 0, 0.3, 0, -2.7.
    gains = torch.tensor([0.0, 0.3, 0.0, -2.7], dtype=torch.float64)
    constant = found["constant"]
    assert constant["rows"] == 4
    assert constant["gain"] == pytest.approx(-0.6)
    assert constant["error"] == pytest.approx(float(gains.std()) / 2)
    assert (constant["blocks"], constant["reward"]) == (6, pytest.approx(-1.6))
    assert list(constant["by_source"]) == ["a", "b"]
    assert constant["by_source"]["a"] == {
        "rows": 2,
        "gain": pytest.approx(0.15),
        "error": pytest.approx(0.15),
    }
    # By source a 6, b 3: the last prompt alone is hard, and both took 3 blocks for it.
    assert found["constant by source"]["gain"] == pytest.approx((0 + 0.3 - 0.3 + 0) / 4)
    single = table([True], ["a"], seed=2)
    alone = rules.compare(single, torch.tensor([6]))
    assert alone["constant"]["error"] is None
    assert rules.measured(alone) is None


def test_what_a_checkpoint_keeps_says_who_is_ahead():
    train = table([True, False] * 4, ["a", "b"] * 4)
    rules = Rules(train, SETTINGS, 3)
    test = table([True, False] * 6, ["a", "b"] * 6, seed=1)
    never = rules.measured(rules.compare(test, torch.full((12,), 6)))
    assert (never.blocks, never.by_kind, never.rows, never.gain) == (6, {"a": 6, "b": 3}, 12, 0)
    assert never.is_as_good
    assert never.describe() == (
        "a constant 6 blocks is as good (+0.000 ± 0.000 over 12 prompts); by kind: a 6, b 3"
    )
    ahead = rules.measured(rules.compare(test, torch.tensor([6, 3] * 6)))
    assert not ahead.is_as_good
    assert ahead.describe() == "worth +0.150 ± 0.045 over 12 prompts above a constant 6 blocks"
    found = evaluate_predictor(new_predictor(), test, SETTINGS, rules)
    assert found.rules["constant"]["gain"] < 0
    assert "above the training rows' constant -" in found.describe()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"rows": 1}, "rows must be at least 2"),
        ({"error": -1.0}, "error must be at least 0"),
        ({"gain": float("nan")}, "gain must be finite"),
        ({"by_kind": {"a": 0}}, "by_kind must have printable names, and 1 to 1,024 blocks"),
        ({"by_kind": {"a\n": 3}}, "by_kind must have printable names"),
    ],
)
def test_a_damaged_comparison_is_refused(change, says):
    good = {"blocks": 4, "by_kind": {"a": 3}, "rows": 9, "gain": 0.1, "error": 0.1}
    assert MeasuredConstant(**good).most_blocks == 4
    with pytest.raises(PolicyError, match=says):
        MeasuredConstant(**{**good, **change})


def test_a_single_row_is_refused():
    with pytest.raises(TrainingError, match="there is 1: expected 2 or more"):
        Rules(table([True], ["a"]), SETTINGS, 3)
