"""A full budget is the dense model."""

import pytest
import torch
from torch.testing import assert_close

from tests.tiny import ALL_FAMILY_NAMES, all_families, padded, random_ids, tiny_buddy, tiny_model


@all_families
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_full_budget_equals_transformers_in_prefill_and_32_decode_steps(family, attention):
    reference = tiny_model(family, attention=attention)
    buddy = tiny_buddy(family, attention=attention, engine="general")
    ids = random_ids(2, 10 + 32)
    with torch.no_grad():
        theirs = reference(ids[:, :10], use_cache=True)
        ours = buddy(ids[:, :10], budget=1.0)
        assert torch.equal(ours.logits, theirs.logits)
        for step in range(10, 42):
            new = ids[:, step : step + 1]
            theirs = reference(new, cache=theirs.cache, use_cache=True)
            ours = buddy(new, budget=1.0, cache=ours.cache)
            # atol: a preallocated cache has other strides, so sums may run in another order.
            assert_close(ours.logits, theirs.logits, atol=2e-5, rtol=1e-5)
            assert ours.executed_blocks.tolist() == [6, 6]


@all_families
def test_full_budget_generates_the_same_greedy_text(family):
    ids = random_ids(1, 7)
    theirs = tiny_model(family).generate(ids, max_new_tokens=24, do_sample=False)
    ours = tiny_buddy(family).generate(ids, budget=1.0, max_new_tokens=24, do_sample=False)
    assert ours.tolist() == theirs.tolist()


@all_families
def test_full_budget_without_a_cache_gives_the_same_gradients(family):
    reference, buddy = tiny_model(family), tiny_buddy(family)
    ids = random_ids(2, 9)
    reference(ids, labels=ids).loss.backward()
    buddy(ids, labels=ids).loss.backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in buddy.model.named_parameters():
        assert_close(parameter.grad, theirs[name].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILY_NAMES)
def test_left_padded_batch_equals_transformers(family):
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (4, 9, 7)], "left")
    if family == "mistral" or family == "qwen2":
        # transformers measures a sliding window in columns, pads included, as here: the same
        # for left pads.
        assert tiny_buddy(family).backbone.windows[-1] == 5
    with torch.no_grad():
        theirs = tiny_model(family)(ids, attention_mask=mask).logits
        ours = tiny_buddy(family)(ids, mask).logits
    real = mask.bool()
    assert_close(ours[real], theirs[real], atol=2e-5, rtol=1e-5)
