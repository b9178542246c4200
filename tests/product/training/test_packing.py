"""Passes without padding: what they compute, and that it is what passes over rectangles compute."""

import copy
import logging

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.engine.naive import naive_hidden
from buddy.training import packing, varlen
from buddy.training.attention import is_grouped
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.router.choosing import plain_choice
from buddy.training.router.straight_through import straight_through_pass
from tests.pretend import PretendDevice, move
from tests.product.training.examples import random_examples
from tests.product.training.test_straight_through import by_token, mixed_depths, tokens_computed
from tests.tiny import (
    CONFIGS,
    NUM_BLOCKS,
    all_families,
    every_family,
    random_router,
    tiny_buddy,
    tiny_model,
)


@pytest.fixture(scope="module")
def batch():
    made = collate(random_examples(4))
    assert made.is_pad.any()
    return made


@pytest.fixture(autouse=True)
def small_rounds(monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 8)  # else rectangles of tiny examples are as good


def run(model, batch, depths):
    choose = plain_choice(model.policy)
    return straight_through_pass(model.backbone, model.policy, batch, depths, choose)


@every_family
def test_tokens_equal_the_naive_reference(family, batch):
    model = tiny_buddy(family)
    depths = mixed_depths(batch)
    with fast_passes(model.backbone):
        out = run(model, batch, depths)
    for row in range(4):
        ids, runs = by_token(model, batch, depths, row)
        expected = naive_hidden(model.backbone, ids, runs, "project")
        assert_close(out.hidden[row, : len(ids)], expected, atol=2e-4, rtol=1e-4)


@all_families
def test_plans_tokens_and_gradients_equal_those_over_rectangles(family, batch):
    model = tiny_buddy(family)
    depths = mixed_depths(batch, seed=1)
    weights = [
        p for name, p in model.model.named_parameters() if "layers.2" in name or ".2." in name
    ]

    def measured(out):
        hidden = out.hidden[batch.rows, batch.columns]
        return hidden, torch.autograd.grad(hidden.square().sum(), weights, allow_unused=True)

    whole = run(model, batch, depths)
    with fast_passes(model.backbone):
        packed = run(model, batch, depths)
    assert packed.lanes_plan == whole.lanes_plan
    (hidden, slopes), (expected, expected_slopes) = measured(packed), measured(whole)
    assert_close(hidden, expected, atol=2e-4, rtol=1e-4)
    largest = max(float(one.abs().max()) for one in expected_slopes if one is not None)
    assert largest > 0
    for one, other in zip(slopes, expected_slopes, strict=True):
        assert_close(one, other, atol=1e-4 * largest, rtol=1e-3)


def test_a_block_computes_the_tokens_that_run_it_and_no_others(batch, monkeypatch):
    monkeypatch.setattr(packing, "_ROUND", 1)
    model = tiny_buddy()
    computed = tokens_computed(model, monkeypatch)
    with fast_passes(model.backbone):
        out = run(model, batch, mixed_depths(batch))
    ran = out.lanes_plan.mask & ~batch.is_pad.flatten()[:, None]
    assert computed == ran.sum(0).tolist()
    assert len(computed) == NUM_BLOCKS


def slow_kernel(query, key, value, ends, key_ends, longest, longest_key, **options):
    """What torch's kernel is to compute: the reference, one sequence after another."""
    assert torch.equal(ends, key_ends)
    assert ends.dtype == torch.int32
    assert options["window_size"] == (-1, 0)
    assert options["enable_gqa"] == (query.shape[1] != key.shape[1])
    lengths = (ends[1:] - ends[:-1]).tolist()
    assert sum(lengths) == len(query)
    assert max(lengths) <= min(longest, longest_key)
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    made = []
    for part in parts:
        laid = (tensor.transpose(0, 1)[None] for tensor in part)
        out = scaled_dot_product_attention(
            *laid, is_causal=True, enable_gqa=True, scale=options["scale"]
        )
        made.append(out[0].transpose(0, 1))
    return torch.cat(made)


@pytest.fixture
def kernel(monkeypatch):
    """Puts a kernel in the place of torch's; what was found of another is forgotten."""

    def put(made):
        monkeypatch.setattr(varlen, "find_kernel", lambda: made)
        varlen.takes_varlen.cache_clear()

    varlen.takes_varlen.cache_clear()
    yield put
    varlen.takes_varlen.cache_clear()


def measured(model, batch, depths):
    """What a pass gives, and the gradients of some weights."""
    out = run(model, batch, depths)
    hidden = out.hidden[batch.rows, batch.columns]
    weights = [p for name, p in model.model.named_parameters() if ".2." in name]
    slopes = torch.autograd.grad(hidden.square().sum(), weights, allow_unused=True)
    return hidden.cpu(), [None if slope is None else slope.cpu() for slope in slopes]


def on_device(family, depths, examples):
    """The same on a pretended GPU."""
    with PretendDevice():
        model = move(tiny_buddy(family))
        batch = collate(examples, model.device)
        with fast_passes(model.backbone):
            assert is_grouped(model.backbone)
            assert varlen.takes_varlen.cache_info().currsize == 1  # tried before a pass, not in one
            return measured(model, batch, depths.to(model.device))


def assert_same(made, expected):
    assert_close(made[0], expected[0], atol=2e-4, rtol=1e-4)
    largest = max(float(slope.abs().max()) for slope in expected[1] if slope is not None)
    for one, other in zip(made[1], expected[1], strict=True):
        assert_close(one, other, atol=1e-4 * largest, rtol=1e-3)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "phi3"])
def test_on_a_gpu_rows_are_packed_with_a_kernel_for_it_and_without(
    family, is_mixed, batch, kernel, caplog
):
    caplog.set_level(logging.INFO, "buddy")
    examples = random_examples(4)
    depths = mixed_depths(batch) if is_mixed else torch.full_like(batch.token_ids, 4)
    expected = measured(tiny_buddy(family), batch, depths)
    assert_same(on_device(family, depths, examples), expected)
    assert "varlen_attn is not used" in caplog.text  # torch's own computes on no CPU
    calls = []

    def counted(query, *rest, **options):
        calls.append(len(query))
        return slow_kernel(query, *rest, **options)

    kernel(counted)
    assert_same(on_device(family, depths, examples), expected)
    tried, *used = calls
    assert tried == sum(varlen._TRIED)
    assert bool(used) == (family in ("llama", "gemma3_text"))  # others have windows everywhere
    assert all(count % 8 == 0 for count in used)  # of tokens, not of rectangles


def test_a_kernel_that_is_wrong_is_not_taken(kernel, caplog):
    caplog.set_level(logging.INFO, "buddy")

    def sees_all(query, *rest, **options):
        return slow_kernel(query, *rest, **options) + 0.1 * query

    cuda = torch.device("cuda")
    with PretendDevice():
        kernel(sees_all)
        assert not varlen.takes_varlen(cuda, torch.bfloat16, 4, 2, 8)
        assert "differ by" in caplog.text
        kernel(None)
        assert not varlen.takes_varlen(cuda, torch.bfloat16, 4, 2, 8)
        kernel(slow_kernel)
        assert varlen.takes_varlen(cuda, torch.bfloat16, 4, 2, 8)
    assert not varlen.takes_varlen(torch.device("cpu"), torch.bfloat16, 4, 2, 8)


def test_a_model_that_drops_attention_out_is_left_to_torch(monkeypatch):
    config = copy.deepcopy(CONFIGS["llama"])
    config.attention_dropout = 0.1
    monkeypatch.setitem(CONFIGS, "llama", config)
    backbone = tiny_buddy().backbone
    with fast_passes(backbone):
        assert not is_grouped(backbone)


@pytest.mark.gpu
def test_on_a_gpu_torchs_kernel_gives_what_rectangles_give():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    examples = random_examples(6, longest=40)
    made = []
    for is_fast in (True, False):
        hf_model = tiny_model("qwen3").to("cuda", torch.bfloat16)
        model = BuddyForCausalLM(hf_model, router=random_router(hf_model).cuda())
        batch = collate(examples, model.device)
        depths = torch.full_like(batch.token_ids, 4)
        if not is_fast:
            made.append(measured(model, batch, depths))
            continue
        config, backbone = model.config, model.backbone
        heads = (config.num_attention_heads, config.num_key_value_heads, backbone.head_dim)
        assert varlen.takes_varlen(model.device, model.dtype, *heads)
        with fast_passes(backbone):
            made.append(measured(model, batch, depths))
    (hidden, slopes), (expected, wanted) = made
    assert_close(hidden, expected, atol=0.1, rtol=0.05)  # of bfloat16, after six blocks
    for slope, other in zip(slopes, wanted, strict=True):
        if other is not None:
            assert float((slope - other).norm() / other.norm()) < 0.05
