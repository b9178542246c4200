"""Sliding windows: who is scored, who is seen by the route, and what comes of the losses."""

import math

import pytest
import torch

from buddy.cli.options import check_labelled_policy
from buddy.errors import BudgetError, DataError, PolicyError
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.perplexity import (
    WindowedText,
    run_perplexity,
    sliding_windows,
    window_losses,
)
from buddy.lab.evaluation.samples import SampleLog
from buddy.records import RunRecord
from tests.product.policies.made import gated
from tests.tiny import NUM_BLOCKS, random_ids, tiny_buddy

WINDOW, STRIDE = 12, 5


def test_windows_score_every_later_token_once():
    windows = sliding_windows(range(40), window=WINDOW, stride=STRIDE)
    scored = windows[:, -STRIDE:].flatten().tolist()
    assert scored == list(range(WINDOW - STRIDE, WINDOW - STRIDE + len(scored)))
    assert len(windows) == 6
    assert len(sliding_windows(range(40), window=WINDOW, stride=STRIDE, limit=2)) == 2
    with pytest.raises(DataError, match="less than one window"):
        sliding_windows(range(11), window=WINDOW, stride=STRIDE)
    with pytest.raises(DataError, match="stride must be from 1 to 11"):
        sliding_windows(range(40), window=WINDOW, stride=WINDOW)


def test_each_window_begins_as_the_tokenizer_begins_a_text():
    windows = sliding_windows(range(40), window=WINDOW, stride=STRIDE, begin=[99])
    assert windows.shape == (6, WINDOW)
    assert windows[:, 0].tolist() == [99] * 6
    assert windows[:, 1:].equal(sliding_windows(range(40), window=WINDOW - 1, stride=STRIDE))
    assert len(sliding_windows(range(11), window=WINDOW, stride=WINDOW - 1, begin=[99])) == 1
    with pytest.raises(DataError, match="less than one window"):
        sliding_windows(range(10), window=WINDOW, stride=STRIDE, begin=[99])


@torch.no_grad()
def test_losses_are_those_of_the_forward_pass_routed_from_the_tokens_before():
    model = tiny_buddy()
    [condition] = plan_conditions(model, ["routed"], ["4 blocks"])
    ids = random_ids(3, WINDOW, seed=2)
    found = window_losses(model, condition, ids, stride=STRIDE)
    seen = torch.arange(WINDOW) < WINDOW - STRIDE
    for row, (loss, blocks, depth) in zip(ids, found, strict=True):
        out = model(row[None], budget="4 blocks", prompt_mask=seen[None], use_cache=False)
        assert out.plan.executed_sets[0] == blocks
        assert depth == 4
        expected = torch.nn.functional.cross_entropy(
            out.logits[0, -STRIDE - 1 : -1], row[-STRIDE:], reduction="sum"
        )
        assert loss == pytest.approx(float(expected), rel=1e-5)
    other = ids.clone()
    other[:, -STRIDE:] = random_ids(3, STRIDE, seed=9)
    plans = [result.blocks for result in found]
    assert [item.blocks for item in window_losses(model, condition, other, stride=STRIDE)] == plans


@torch.no_grad()
def test_the_scored_tokens_reach_the_route_only_where_asked_for():
    model = tiny_buddy()
    [condition] = plan_conditions(model, ["routed"], ["4 blocks"])
    ids = random_ids(1, WINDOW, seed=2).repeat(12, 1)
    ids[:, 2:] = random_ids(12, WINDOW - 2, seed=3)
    stride = WINDOW - 2
    honest = window_losses(model, condition, ids, stride=stride)
    leaking = window_losses(model, condition, ids, stride=stride, leaks=True)
    assert len({item.blocks for item in honest}) == 1
    assert len({item.blocks for item in leaking}) > 1


def test_a_method_that_keeps_no_budget_stands_at_the_mean_depth_of_all_tokens(tmp_path):
    model = gated("d-llm")
    conditions = plan_conditions(model, ["d-llm", "d-llm:0.7"])
    ids = random_ids(5, WINDOW, seed=2)
    text = WindowedText(name="words", ids=ids, stride=STRIDE)
    with SampleLog(tmp_path / "log", {}) as log:
        out = run_perplexity(model, conditions, text, log=log)
        again = run_perplexity(model, conditions, text, log=log)
    assert again == out
    for condition in conditions:
        model.set_policy(condition.spec)
        depth = float(model(ids, use_cache=False).lanes.executed.double().mean())
        assert depth < NUM_BLOCKS
        for entry in (*out["points"], *out["execution"]):
            if entry["policy"] == condition.spec:
                assert entry["mean_blocks"] == pytest.approx(depth)
                assert entry["blocks"] == round(depth)


def test_perplexity_and_its_error_by_hand(tmp_path):
    model = tiny_buddy()
    conditions = plan_conditions(model, ["routed"], ["1.0", "4 blocks"])
    ids = random_ids(6, WINDOW, seed=4)
    text = WindowedText(name="words", ids=ids, stride=STRIDE)
    calls = []
    out = run_perplexity(
        model,
        conditions,
        text,
        batch=4,
        on_windows=lambda condition, count: calls.append(count),
    )
    assert calls == [4, 2, 4, 2]
    [point] = [p for p in out["points"] if (p["blocks"], p["metric"]) == (4, "perplexity")]
    found = window_losses(model, conditions[1], ids, stride=STRIDE)
    means = [result.nll / STRIDE for result in found]
    mean = sum(means) / 6
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / 5 / 6)
    assert point["value"] == pytest.approx(math.exp(mean))
    assert point["stderr"] == pytest.approx(math.exp(mean) * error)
    assert point["tokens"] == 6 * STRIDE
    for _ in range(2):  # the second time from the log alone
        with SampleLog(tmp_path / "log", {}) as log:
            again = run_perplexity(model, conditions, text, batch=4, log=log)
        assert again == out


def test_conditions_are_checked_before_anything_runs():
    model = tiny_buddy()
    labels = [
        (c.label, c.blocks)
        for c in plan_conditions(model, ["routed", "a=static:2,3", "random:1"], ["1.0", "4 blocks"])
    ]
    assert labels == [("full", 6), ("routed", 4), ("a", 4), ("random:1", 4)]
    with pytest.raises(BudgetError):
        plan_conditions(model, ["static:2,3"], ["3 blocks"])
    with pytest.raises(BudgetError):
        plan_conditions(model, [], ["1.5"])
    with pytest.raises(PolicyError, match="share the label a"):
        plan_conditions(model, ["a=static:2", "a=static:3"], ["5 blocks"])
    with pytest.raises(PolicyError, match="no policy"):
        plan_conditions(model, ["nothing"], ["5 blocks"])


def test_an_equals_sign_in_a_path_ends_no_label(tmp_path):
    path = tmp_path / "lr=2" / "order.json"
    path.parent.mkdir()
    made = RunRecord(kind="x", config={}, results={"removal_order": [1, 2, 3, 4]}, model=None)
    made.save(path)
    given = [f"static:{path}", f"mine=static:{path}", "a:b=static:4,3,2"]
    for text in given:
        check_labelled_policy(text)
    found = plan_conditions(tiny_buddy(), given, ["4 blocks"])
    assert [result.label for result in found] == ["order", "mine", "a:b"]
    assert found[0].spec == found[1].spec == given[0]
    with pytest.raises(PolicyError, match="no policy 'b'"):
        check_labelled_policy("a=b:lr=2")


def test_a_long_list_of_blocks_goes_by_its_first_ones_and_is_measured_whole(monkeypatch):
    monkeypatch.setattr("buddy.lab.evaluation.conditions._LABEL_WIDTH", 12)
    model = tiny_buddy()
    [own] = plan_conditions(model, ["static:5,4,3,2,1"], ["3 blocks"])
    assert (own.label, own.spec) == ("static:5,4,…", "static:5,4,3,2,1")
    assert own.fixed_blocks() == (0, 1, 2)
    with pytest.raises(PolicyError, match="share the label static:5,4,…: name them"):
        plan_conditions(model, ["static:5,4,3,2,1", "static:5,4,3,1,2"], ["3 blocks"])


def test_equal_sets_of_blocks_share_their_samples_and_others_do_not():
    model = tiny_buddy()
    first, same, other, routed, drawn = plan_conditions(
        model, ["static:2,3,1", "b=static:3,2,4", "static:1,4", "routed", "random:0"], ["4 blocks"]
    )
    assert first.key == same.key == "blocks:0,1,4,5"
    assert len({first.key, other.key, routed.key, drawn.key}) == 4
