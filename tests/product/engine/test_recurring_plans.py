"""Plans that recur are captured whole: the general path's tokens, in fewer launches."""

import pytest
import torch
from torch.testing import assert_close

from buddy.engine.executors import recurring
from tests.product.engine.decoding import decode
from tests.product.engine.test_graphs import TOLERANCE, record, twins
from tests.tiny import every_kv_policy, padded, random_ids

IDS, MASK = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
MORE = random_ids(3, 8, seed=5)
MIXED = {"budget": ["3 blocks", "4 blocks", 1.0]}


@pytest.fixture
def replays(monkeypatch):
    """What was replayed, in order: names of the work that was captured."""
    seen = []

    def counted(work):
        replay, name = record(work), getattr(work, "func", work).__name__
        return lambda: (seen.append(name), replay())

    monkeypatch.setattr("tests.product.engine.test_graphs.record", counted)
    return seen


@pytest.fixture(params=[1, 3], ids=["at-once", "third-time"])
def times(request, monkeypatch):
    """How often a plan comes before it is captured; few plans are kept."""
    monkeypatch.setattr(recurring, "_TIMES", request.param)
    monkeypatch.setattr(recurring, "_MOST", 3)


@every_kv_policy
@pytest.mark.parametrize("reroute", ["step", "prefill", 3])
def test_a_batch_of_mixed_budgets_equals_the_general_path(
    monkeypatch, times, replays, kv_policy, reroute
):
    graphs, general, decoder = twins(monkeypatch, kv_policy=kv_policy)
    made, plans, _ = decode(graphs, IDS, MASK, MORE, **MIXED, reroute=reroute)
    expected, expected_plans, _ = decode(general, IDS, MASK, MORE, **MIXED, reroute=reroute)
    assert torch.equal(plans, expected_plans)
    assert_close(made, expected, **TOLERANCE)
    assert ("_run_order" in replays) or reroute == "step"
    (arena,) = decoder._arenas
    assert len(arena._plans._known) <= 3


@every_kv_policy
def test_a_session_may_change_plans_and_paths_between_steps(monkeypatch, times, kv_policy):
    graphs, general, _ = twins(monkeypatch, kv_policy=kv_policy)
    budgets = [["3 blocks", "5 blocks"], ["4 blocks", "4 blocks"]]
    with torch.no_grad():
        texts = []
        for buddies in ((general, general), (graphs, general)):
            cache, texts = None, [*texts, []]
            for step in range(16):
                ids = random_ids(2, 6 if step == 0 else 1, seed=step)
                buddy, budget = buddies[step % 5 == 4], budgets[step // 4 % 2]
                out = buddy(ids, cache=cache, budget=budget)
                cache = out.cache
                texts[-1].append(out.logits[:, -1])
    assert_close(torch.stack(texts[1]), torch.stack(texts[0]), **TOLERANCE)


@every_kv_policy
def test_a_plan_that_stays_is_three_launches_a_step(monkeypatch, replays, kv_policy):
    monkeypatch.setattr(recurring, "_TIMES", 3)
    graphs, _, _ = twins(monkeypatch, policy="static:2,3,4,1", kv_policy=kv_policy)
    ids, launches = random_ids(2, 5), []
    with torch.no_grad():
        cache = graphs(ids, budget="4 blocks").cache
        for _ in range(5):
            replays.clear()
            graphs(ids[:, :1], budget="4 blocks", cache=cache)
            launches.append(tuple(replays))
    each = ("_begin", *["_run"] * 4, "_head")
    assert launches[:2] == [each, each]
    assert launches[2:] == [("_begin", "_run_order", "_head")] * 3


def test_plans_that_came_last_are_kept(monkeypatch):
    monkeypatch.setattr(recurring, "_MOST", 2)
    monkeypatch.setattr(recurring, "_TIMES", 3)
    plans, made = recurring.RecurringPlans(), []

    def come(name):
        return plans.find(name, lambda: made.append(name) or name.upper) is not None

    assert [come(name) for name in "aaabab"] == [False, False, True, False, True, False]
    assert not come("c")  # in the place of a, which came before b
    assert [come("a"), come("a"), come("a")] == [False, False, True]
    assert made == ["a", "a"]
