"""Lanes: every token has a plan of its own, and sequences join and leave between steps."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.depth.plan import DepthPlan
from buddy.engine.executors.graphs import GraphDecoder
from buddy.engine.executors.native.decoder import NativeDecoder
from buddy.errors import PromptError
from tests.product.engine.schedules import Schedule, last_of
from tests.product.engine.test_graphs import record
from tests.tiny import (
    NUM_BLOCKS,
    delete_blocks,
    every_family,
    every_kv_policy,
    random_ids,
    tiny_model,
)

# atol: the cache, the gather and the batched projection change the order of sums.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
MODEL = {name: BuddyForCausalLM(tiny_model(name)) for name in ("llama", "mistral", "qwen3")}
SHALLOW = {name: BuddyForCausalLM(delete_blocks(tiny_model(name), {4, 5})) for name in MODEL}
"""Four blocks do for many schedules: a token may run any of them, whatever others ran."""
POLICIES = ["zero", "mask", "project", "lazy"]
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


def follow(schedule, steps, most_tokens=4):
    """Each token of some steps against the reference; the plans that ran."""
    plans, made = set(), {}
    for _ in range(steps):
        numbers, counts, out = schedule.step(most_tokens)
        assert out.executed.tolist() == out.plan.depth.tolist()
        plans |= set(out.plan.executed_sets)
        for number, hidden in last_of(numbers, counts, out).items():
            fed = schedule.fed[number]
            assert schedule.session.sequences[number].length == len(fed.tokens)
            made.setdefault(number, (fed, []))[1].append(hidden)
    # At their ends: what comes later changes nothing of what the reference says of a token.
    for fed, parts in made.values():
        found = torch.cat(parts)
        assert_close(found, schedule.expected(fed)[-len(found) :], **TOLERANCE)
    return plans


@every_family
@every_kv_policy
@torch.no_grad()
def test_the_general_path_equals_the_reference(family, kv_policy):
    buddy = BuddyForCausalLM(tiny_model(family), engine="general")
    assert len(follow(Schedule(buddy, kv_policy, seed=3), 12)) > 12


@needs_cc
@every_family
@every_kv_policy
@torch.no_grad()
def test_compiled_code_equals_the_reference(family, kv_policy):
    buddy = BuddyForCausalLM(tiny_model(family))
    native = NativeDecoder(buddy.backbone)
    assert len(follow(Schedule(buddy, kv_policy, seed=4, executors=(native,)), 16)) > 16


@every_kv_policy
@torch.no_grad()
def test_captured_blocks_equal_the_reference(kv_policy):
    buddy = MODEL["qwen3"]
    graphs = GraphDecoder(buddy.backbone, record)
    schedule = Schedule(buddy, kv_policy, seed=5, executors=(graphs,))
    assert len(follow(schedule, 10, most_tokens=1)) > 5


@needs_cc
@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from(POLICIES), st.sampled_from(sorted(MODEL)), st.booleans()
)
def test_random_schedules_equal_the_reference(seed, kv_policy, family, few):
    buddy = SHALLOW[family]
    with torch.no_grad():
        native = NativeDecoder(buddy.backbone)
        schedule = Schedule(buddy, kv_policy, seed, executors=(None, native))
        follow(schedule, 6, most_tokens=1 if few else 5)


@torch.no_grad()
def test_a_row_that_was_left_is_taken_again_and_holds_nothing_of_before():
    for kv_policy in POLICIES:
        schedule = Schedule(MODEL["llama"], kv_policy, seed=9)
        for _ in range(3):
            follow(schedule, 3)
            schedule.session.leave(*schedule.fed)
            schedule.fed.clear()
        assert schedule.session.kv.rows <= 4


def test_a_sequence_that_is_not_there_is_refused():
    session = MODEL["llama"].new_session(2, 8)
    first = session.join()
    for numbers in ([first, first], [first + 1]):
        with pytest.raises(PromptError, match="holds the sequences"):
            session.find(numbers)
    session.leave(first)
    second = session.join()
    assert second != first
    session.reorder_cache(torch.tensor([0, 0]))
    assert not {first, second} & set(session.sequences)


@torch.no_grad()
def test_what_cannot_be_fed_is_refused_and_loses_nothing():
    schedule = Schedule(MODEL["llama"], "lazy", seed=2)
    follow(schedule, 3)
    number, before = next(iter(schedule.fed)), schedule.session.state
    whole = DepthPlan.full(80, NUM_BLOCKS)
    for counts, tokens, says in (
        ([0], 0, "at least one of each"),
        ([3], 2, "as the counts say"),
        ([80], 80, "context holds 64"),
    ):
        with pytest.raises(PromptError, match=says):
            schedule.feed([number], counts, random_ids(1, tokens)[0], whole)
        assert schedule.session.state is before
    follow(schedule, 2)


@torch.no_grad()
def test_the_residuals_of_sequences_that_left_are_given_back():
    schedule = Schedule(MODEL["llama"], "lazy", seed=1)
    number = schedule.session.join()
    plan = DepthPlan(torch.zeros(60, NUM_BLOCKS, dtype=torch.bool))
    for _ in range(4):  # a prompt that skips everything, again and again
        schedule.feed([number], [60], random_ids(1, 60)[0], plan)
        schedule.session.leave(number)
        number = schedule.session.join()
    skipped = schedule.session.kv.skipped
    assert len(skipped.arena.stored[0]) == 64
    assert skipped.arena.counts == [0]
