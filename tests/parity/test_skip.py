"""Skipping a set of blocks is deleting them."""

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from tests.tiny import (
    ALL_FAMILY_NAMES,
    NUM_BLOCKS,
    all_families,
    delete_blocks,
    every_kv_policy,
    padded,
    random_ids,
    some_families,
    tiny_model,
    with_kv_policies,
)


def static(family, skipped, **options):
    order = ",".join(map(str, sorted(skipped)))
    return BuddyForCausalLM(tiny_model(family), policy=f"static:{order}", **options)


@with_kv_policies(ALL_FAMILY_NAMES)
def test_skipping_equals_deleting_in_prefill_and_decode(family, kv_policy):
    check_skipping(family, kv_policy, {1, 4})


@some_families
@every_kv_policy
@pytest.mark.parametrize("skipped", [{2}, {1, 2, 3}])
def test_skipping_other_sets_equals_deleting_them(family, kv_policy, skipped):
    check_skipping(family, kv_policy, skipped)


def check_skipping(family, kv_policy, skipped):
    buddy = static(family, skipped, kv_policy=kv_policy)
    reference = delete_blocks(tiny_model(family), skipped)
    dense = tiny_model(family)
    budget = f"{NUM_BLOCKS - len(skipped)} blocks"
    ids = random_ids(2, 14)
    with torch.no_grad():
        theirs = reference(ids).logits
        ours = buddy(ids[:, :10], budget=budget)
        # atol: attention over a cache sums in another order.
        assert_close(ours.logits, theirs[:, :10], atol=2e-5, rtol=1e-5)
        for step in range(10, 14):
            new = ids[:, step : step + 1]
            ours = buddy(new, budget=budget, cache=ours.cache)
            assert_close(ours.logits[:, 0], theirs[:, step], atol=2e-5, rtol=1e-5)
        assert not torch.allclose(theirs, dense(ids).logits, atol=1e-2)


@all_families
def test_skipping_equals_deleting_in_gradients(family):
    buddy = static(family, {1, 4})
    reference = delete_blocks(tiny_model(family), {1, 4})
    ids = random_ids(2, 9)
    reference(ids, labels=ids).loss.backward()
    buddy(ids, labels=ids, budget="4 blocks").loss.backward()
    theirs = [p.grad for p in reference.model.layers.parameters()]
    ran = [buddy.backbone.blocks[i] for i in (0, 2, 3, 5)]
    ours = [p.grad for block in ran for p in block.parameters()]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for p in buddy.backbone.blocks[1].parameters())


@pytest.mark.parametrize("side", ["left", "right"])
def test_skipping_equals_deleting_for_each_row_of_a_padded_batch(side):
    rows = [random_ids(1, n, seed=n)[0] for n in (5, 9, 7)]
    ids, mask = padded(rows, side)
    buddy = static("qwen2", {1, 3, 4})
    with torch.no_grad():
        ours = buddy(ids, mask, budget=["3 blocks", "5 blocks", "4 blocks"]).logits
        for row, removed, length in ((0, {1, 3, 4}, 5), (1, {1}, 9), (2, {1, 3}, 7)):
            theirs = delete_blocks(tiny_model("qwen2"), removed)(rows[row][None]).logits[0]
            assert len(theirs) == length
            assert_close(ours[row][mask[row].bool()], theirs, atol=2e-5, rtol=1e-5)
