"""The breakdown: pieces are timed where they happen, and nothing of it stays."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.engine.clock import HostClock
from buddy.engine.probe import piece
from buddy.lab.evaluation.conditions import plan_conditions
from buddy.lab.evaluation.speed.breakdown import profiled
from buddy.lab.evaluation.speed.speed import SpeedConfig, profile_once, subjects_of
from tests.tiny import random_ids, random_router, tiny_model

CONTEXT, NEW = 9, 5


def routed_model(**options):
    plain = tiny_model()
    router = random_router(plain, summary="ema", ema_decay=0.5)
    return BuddyForCausalLM(plain, router=router, engine="general", **options)


@pytest.fixture(scope="module")
def model():
    return routed_model()


class WorkClock:
    """Stands still, but for what is added."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def seconds(self, start, stop):
        return stop - start


@pytest.mark.parametrize("kv_policy", ["zero", "mask", "project", "lazy"])
@pytest.mark.parametrize("policy", ["routed", "random:1", "static:3,1,2,4"])
def test_a_profiled_pass_gives_the_same_tokens_and_leaves_nothing(policy, kv_policy):
    model = routed_model(kv_policy=kv_policy)
    condition = plan_conditions(model, (policy,), ("3 blocks",))
    (subject,) = subjects_of(model, condition, SpeedConfig(transformers=False))[1:]
    ids = random_ids(3, CONTEXT)
    expected = subject.generate(ids, NEW)
    with profiled(HostClock()) as profiler:
        assert torch.equal(subject.generate(ids, NEW), expected)
        logits = subject.prefill(ids).logits
        heard = profiler.position
    assert heard > 0
    assert torch.equal(subject.prefill(ids).logits, logits)
    assert profiler.position == heard


def test_a_profiler_hears_nothing_of_another_thread(model):
    ids = random_ids(1, CONTEXT)
    with profiled(HostClock()) as profiler, ThreadPoolExecutor(1) as pool:
        pool.submit(model.generate, ids, budget="3 blocks", max_new_tokens=2).result()
        assert profiler.position == 0
        model.generate(ids, budget="3 blocks", max_new_tokens=2)
        assert profiler.position > 0


def passes(model, *policies, rows=2):
    """Seconds of each piece of decode, of several profiled passes of each policy in turn."""
    conditions = plan_conditions(model, policies, ("3 blocks",))
    subjects = subjects_of(model, conditions, SpeedConfig(transformers=False))[1:]
    for _ in range(8):
        for subject in subjects:
            profile_once(subject, random_ids(rows, CONTEXT), NEW, HostClock())
    return [subject.series.pieces["decode"] for subject in subjects]


def test_a_router_costs_more_than_an_order_does(model):
    # The least of the passes: what another process takes is not the router's.
    routed, static = (
        min(item["router"] for item in of_policy)
        for of_policy in passes(model, "routed", "static:3,1,2,4")
    )
    assert routed > static > 0


def test_each_piece_is_noted_where_it_happens(model):
    # Rows of a static plan stay together; those of a router are gathered and scattered.
    (static,) = passes(model, "static:3,1,2,4", rows=4)
    (drawn,) = passes(model, "random", rows=4)
    assert {item["gather_scatter"] for item in static} == {0}
    assert min(item["kv_fill"] for item in static) > 0
    assert min(item["gather_scatter"] for item in drawn) > 0


def test_a_piece_within_another_is_counted_once(model):
    clock = WorkClock()

    def work(seconds, inner=lambda: None):
        def run():
            clock.now += seconds
            inner()
            clock.now += seconds

        return run

    def timed(name, function):
        def run():
            with piece(name):
                function()

        return run

    with profiled(clock) as profiler:
        inner = timed("gather_scatter", work(1.0))
        run = timed("blocks", work(2.0, inner))
        run()
        clock.now += 5.0
        first = profiler.position
        run()
        assert profiler.breakdown(17.0) == {
            "blocks": 8.0,
            "router": 0.0,
            "gather_scatter": 4.0,
            "kv_fill": 0.0,
            "head": 0.0,
            "host": 5.0,
        }
        assert profiler.breakdown(6.0, first)["blocks"] == 4.0
        assert profiler.breakdown(11.0, 0, first)["host"] == 5.0
