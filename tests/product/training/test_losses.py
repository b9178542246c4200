import pytest
import torch
from torch.testing import assert_close

from buddy.backbone.backbone import Backbone
from buddy.training import losses as losses_module
from buddy.training.attention import fast_attention, grouped_attention
from buddy.training.losses import answer_losses, mean_by_row
from tests.tiny import all_families, random_ids, tiny_model


@all_families
def test_losses_and_gradients_equal_torchs_cross_entropy(family, monkeypatch):
    monkeypatch.setattr(losses_module, "HEAD_TOKENS", 3)  # several pieces, the last one short
    model = tiny_model(family).requires_grad_(False)
    backbone = Backbone(model)
    torch.manual_seed(0)
    hidden = torch.randn(7, 32, requires_grad=True)
    targets = random_ids(1, 7)[0]
    weights = torch.rand(7)
    found = answer_losses(backbone, hidden, targets)
    (found * weights).sum().backward()
    mine, hidden.grad = hidden.grad, None
    expected = torch.nn.functional.cross_entropy(backbone.logits(hidden), targets, reduction="none")
    (expected * weights).sum().backward()
    # Both are float32 sums over 97 logits, in another order.
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_close(mine, hidden.grad, atol=1e-5, rtol=1e-4)


def test_mean_by_row():
    rows = torch.tensor([0, 0, 2])
    assert mean_by_row(torch.tensor([1.0, 3.0, 5.0]), rows, 3).tolist() == [2.0, 0.0, 5.0]


@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3", "gemma3_text", "granite"])
def test_training_attention_equals_the_fused_kernel_in_values_and_gradients(family):
    backbone = Backbone(tiny_model(family))
    ids = random_ids(3, 11)
    results = []
    for fast in (False, True):
        weight = backbone.blocks[0].self_attn.v_proj.weight
        weight.grad = None
        positions = torch.arange(11).expand(3, -1)
        hidden = backbone.embed(ids)
        rotary = backbone.rotary(hidden, positions)
        if fast:
            with fast_attention(backbone):
                assert backbone.config._attn_implementation != "sdpa"
                out = backbone.run_block(0, hidden, None, positions, rotary, None)
        else:
            out = backbone.run_block(0, hidden, None, positions, rotary, None)
        out.square().sum().backward()
        results.append((out.detach(), weight.grad.clone()))
    assert backbone.config._attn_implementation == "sdpa"
    # Another order of sums, over values of up to some hundreds.
    assert_close(results[1][0], results[0][0], atol=1e-4, rtol=1e-4)
    assert_close(results[1][1], results[0][1], atol=1e-2, rtol=1e-4)


def test_attention_with_a_mask_or_over_a_long_text_is_transformers_own():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    mask = torch.ones(6, 6, dtype=torch.bool).tril(1)[None, None]
    found, _ = grouped_attention(module, query, key, value, mask)
    repeated = (key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    assert_close(found, expected.transpose(1, 2))
