"""The cache where it grows, where rows part, and where nothing is left to do."""

import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.budget.source import ConstantBudget
from buddy.engine.naive import naive_decode
from buddy.engine.state import cache as cache_of_blocks
from buddy.engine.state.cache import BlockKVCache
from buddy.errors import ModelError, PolicyError, PromptError
from tests.tiny import every_kv_policy, random_ids, tiny_buddy, tiny_model


@every_kv_policy
@torch.no_grad()
def test_a_cache_that_grows_at_every_few_steps_changes_nothing(kv_policy):
    buddy = tiny_buddy("mistral", kv_policy=kv_policy, summary="ema", ema_decay=0.5)
    ids = random_ids(1, 20)
    session = buddy.new_session(1, 2)
    out = buddy(ids[:, :4], budget="3 blocks", cache=session)
    expected, plans = naive_decode(
        buddy.backbone, buddy.policy, ids[0], 4, blocks=3, kv_policy=kv_policy
    )
    for step in range(4, 20):
        out = buddy(ids[:, step : step + 1], budget="3 blocks", cache=session)
        assert_close(out.logits[0, -1], expected[step - 3], atol=5e-5, rtol=1e-4)
    assert len({tuple(plan.tolist()) for plan in plans}) > 1


@every_kv_policy
@torch.no_grad()
def test_several_tokens_at_once_after_the_prefill(kv_policy):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,3", kv_policy=kv_policy)
    ids = random_ids(2, 12)
    whole = buddy(ids, budget="4 blocks").logits
    out = buddy(ids[:, :5], budget="4 blocks")
    for part in (ids[:, 5:8], ids[:, 8:12]):
        out = buddy(part, budget="4 blocks", cache=out.cache)
    assert_close(out.logits, whole[:, 8:], atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_that_never_run_a_block_cost_the_others_nothing(monkeypatch):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,2,3", engine="general")
    touched = []
    plain = buddy.backbone.project
    monkeypatch.setattr(
        buddy.backbone, "project", lambda *given: touched.append(1) or plain(*given)
    )
    out = buddy(random_ids(2, 4), budget=["3 blocks", 1.0])
    for step in range(20):
        new = random_ids(2, 1, seed=step)
        out = buddy(new, budget=["3 blocks", 1.0], cache=out.cache)
    assert touched == []


@pytest.mark.parametrize("kv_policy", ["project", "lazy"])
@torch.no_grad()
def test_a_finished_row_that_is_fed_pads_leaves_nothing_to_project(kv_policy, monkeypatch):
    buddy = BuddyForCausalLM(
        tiny_model(), policy="static:1,2,3", kv_policy=kv_policy, engine="general"
    )
    projected = []
    plain = buddy.backbone.project

    def project(block, hidden, positions):
        projected.extend((block, position) for position in positions.tolist())
        return plain(block, hidden, positions)

    monkeypatch.setattr(buddy.backbone, "project", project)
    ids, new, budgets = random_ids(2, 4), random_ids(2, 4, seed=1), ["3 blocks", 1.0]
    mask = torch.ones(2, 4, dtype=torch.long)
    out = buddy(ids, mask, budget=budgets)
    of_prompt = len(projected)
    for step in range(3):
        mask = torch.cat([mask, torch.tensor([[0], [1]])], 1)
        out = buddy(new[:, step : step + 1], mask, budget=budgets, cache=out.cache)
    assert len(projected) == of_prompt
    # The finished row comes back: the blocks that it skipped now need its prompt, and no pad.
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    out = buddy(new[:, 3:], mask, budget=1.0, cache=out.cache)
    assert sorted(projected) == [(block, slot) for block in (1, 2, 3) for slot in range(4)]
    alone = buddy(ids[:1], budget=budgets[0])
    alone = buddy(new[:1, 3:], budget=1.0, cache=alone.cache)
    # atol: pads stand between the prompt and the new token, so sums run in another order.
    assert_close(out.logits[:1], alone.logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("engine", ["auto", "general"])
@every_kv_policy
@torch.no_grad()
def test_a_step_that_fails_leaves_the_session_as_it_was(engine, kv_policy):
    buddy = tiny_buddy(summary="ema", ema_decay=0.5, kv_policy=kv_policy, engine=engine)
    ids, new = random_ids(2, 6), random_ids(2, 4, seed=1)
    options = {"budget": "3 blocks"}

    def stepped(fails):
        session = buddy(ids, **options).cache
        logits = []
        for step in range(4):
            token = new[:, step : step + 1]
            if fails:
                with pytest.raises(PromptError, match="token id 97 is not one of"):
                    buddy(torch.full_like(token, 97), cache=session, **options)
                bias = buddy.router.decision.up.bias
                kept = bias.clone()
                bias.fill_(torch.nan)
                with pytest.raises(PolicyError, match="NaN"):
                    buddy(token, cache=session, **options)
                bias.copy_(kept)
            logits.append(buddy(token, cache=session, **options).logits)
        return torch.cat(logits, 1)

    assert_close(stepped(fails=True), stepped(fails=False))


@torch.no_grad()
def test_generate_goes_on_from_a_session():
    buddy = tiny_buddy(summary="ema", ema_decay=0.5)
    ids = random_ids(1, 7)
    options = {"budget": "4 blocks", "max_new_tokens": 6, "do_sample": False}
    session = buddy(ids[:, :5], budget="4 blocks").cache
    made = buddy.generate(ids, cache=session, **options)
    assert [sequence.length for sequence in session.sequences.values()] == [12]
    again = buddy(ids[:, :5], budget="4 blocks").cache
    expected = buddy.generate(ids, cache=again, return_dict_in_generate=True, **options)
    assert torch.equal(made, expected.sequences)


@pytest.mark.parametrize("engine", ["auto", "general"])
@torch.no_grad()
def test_a_session_of_another_number_format_is_refused(engine):
    buddy = tiny_buddy(engine=engine)
    ids = random_ids(1, 5)
    session = buddy(ids).cache
    buddy.model.to(torch.bfloat16)
    buddy(ids)  # the weights are looked at anew
    with pytest.raises(ModelError, match="begin a new session"):
        buddy(ids[:, :1], cache=session)


@pytest.mark.parametrize("engine", ["general", "auto"])
@torch.no_grad()
def test_a_cache_that_cannot_grow_is_as_it_was(engine, monkeypatch):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,3", engine=engine)
    ids = random_ids(1, 30)
    session, expected = buddy.new_session(1, 10), buddy.new_session(1, 10)
    for cache in (session, expected):
        buddy(ids[:, :6], budget="4 blocks", cache=cache)
    grown, calls = cache_of_blocks._grown, []

    def fails_at_the_third(*parts):
        calls.append(parts)
        if len(calls) == 3:
            raise MemoryError
        return grown(*parts)

    monkeypatch.setattr(cache_of_blocks, "_grown", fails_at_the_third)
    with pytest.raises(MemoryError):
        buddy(ids[:, 6:], budget="4 blocks", cache=session)
    monkeypatch.setattr(cache_of_blocks, "_grown", None)
    out = buddy(ids[:, 6:9], budget="4 blocks", cache=session)
    assert session.kv.capacity == 10
    assert torch.equal(out.logits, buddy(ids[:, 6:9], budget="4 blocks", cache=expected).logits)


@torch.no_grad()
def test_a_branch_that_fails_leaves_no_sequence(monkeypatch):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,3")
    session = buddy.new_session(2, 10)
    buddy(random_ids(2, 6), budget="4 blocks", cache=session)
    before = session.sequences

    def fails(*parts):
        raise MemoryError

    monkeypatch.setattr(session.kv, "copy", fails)
    with pytest.raises(MemoryError):
        session.branch(next(iter(before)), 4, ConstantBudget(4))
    assert session.sequences == before


@torch.no_grad()
def test_a_pass_that_fails_leaves_zeros(monkeypatch):
    buddy = BuddyForCausalLM(tiny_model(), policy="static:1,3", engine="general")
    session = buddy.new_session(1, 20)
    buddy(random_ids(1, 4), cache=session)
    run_block = buddy.backbone.run_block

    def fails(block, *parts):
        if block == 3:
            raise MemoryError
        return run_block(block, *parts)

    monkeypatch.setattr(buddy.backbone, "run_block", fails)
    with pytest.raises(MemoryError):
        buddy(random_ids(1, 5), cache=session)
    keys, values, _ = session.kv.buffers()
    assert all(buffer[0, :, :4].all() for buffer in (*keys, *values))
    assert not any(buffer[0, :, 4:].any() for buffer in (*keys, *values))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc on this system")
def test_a_long_row_among_short_ones_takes_the_memory_of_its_own_tokens():
    rows, short, long, width = 64, 16, 8192, 4 * 64 * 2 * 4 * 4  # bytes of a slot in all blocks
    kv = BlockKVCache(4, rows, 16, "zero", Mock(), [torch.device("cpu")] * 4, torch.float32)
    kv.allocate(4, 64, torch.float32)

    def write(row, stop):
        kv.will_write([row], [stop])
        for buffer in (*kv.buffers()[0], *kv.buffers()[1]):
            buffer[row, :, :stop] = row + 1

    for row in range(rows):
        write(row, short)
    before, live = resident_bytes(), (long + rows * short) * width
    write(3, long)
    assert rows * long * width > 40 * live
    assert resident_bytes() - before < 1.5 * live
    assert kv.num_bytes() == live - short * width
    for buffer in (*kv.buffers()[0], *kv.buffers()[1]):
        assert all(bool((buffer[row, :, :short] == row + 1).all()) for row in range(rows))
        assert bool((buffer[3] == 4).all())
    kv.free(3, long)
    assert resident_bytes() - before < 0.5 * live
    assert not any(bool(buffer[3].any()) for buffer in kv.buffers()[0])
    assert all(bool((buffer[4, :, :short] == 5).all()) for buffer in kv.buffers()[1])
