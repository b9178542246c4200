"""A router that learns from measured swaps: its loss, against plans that are run one by one."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from buddy.depth.select import select_blocks
from buddy.engine.naive import naive_hidden
from buddy.training.batches import collate
from buddy.training.router.measured import draw_swaps, measured_loss, with_swaps
from buddy.training.router.recipe import RouterSettings
from tests.product.training.examples import random_examples
from tests.tiny import NUM_BLOCKS, tiny_buddy

BUDGETS = torch.tensor([4, 5, 6, 3])
WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])
SETTINGS = RouterSettings(method="measured", samples=4)
DRAWN = {"places": range(4), "seed": 7}


@pytest.fixture(scope="module")
def batch():
    return collate(random_examples(4))


def routed(model, batch):
    """Scores of each row's prompt alone, as inference has them."""
    scores = []
    for row in range(4):
        prompt = batch.token_ids[row][batch.is_prompt[row]]
        seen = model.backbone.embed(prompt[None])
        layer = model.backbone.blocks[0]
        values = layer.self_attn.v_proj(layer.input_layernorm(seen))
        scores.append(model.router.decision.fuse(model.router.decision(values.mean(1)))[0])
    return torch.nn.functional.pad(torch.stack(scores), (1, 1))


def answer_loss(model, batch, row, runs):
    """Nats a token of one answer under one plan, by the executable specification."""
    length = int(batch.columns[batch.rows == row].max()) + 2
    ids = batch.token_ids[row, :length]
    with torch.no_grad():
        hidden = naive_hidden(model.backbone, ids, runs.expand(length, -1), "project")
        columns = batch.columns[batch.rows == row]
        log_probs = model.backbone.logits(hidden[columns]).log_softmax(1)
    return -log_probs.gather(1, ids[columns + 1, None]).mean()


def test_the_loss_is_that_of_plans_run_one_by_one_and_only_the_router_gets_a_gradient(batch):
    model = tiny_buddy()
    model.requires_grad_(True)
    loss = measured_loss(model, batch, BUDGETS, WEIGHTS, SETTINGS, **DRAWN)
    loss.backward()
    found = {name: p.grad for name, p in model.router.named_parameters()}
    assert all(p.grad is None for p in model.model.parameters())
    for parameter in model.router.parameters():
        parameter.grad = None
    scores = routed(model, batch)
    plan = select_blocks(scores.detach(), BUDGETS)
    out, into = draw_swaps(scores.detach(), plan, model.policy, SETTINGS, **DRAWN)
    total = torch.zeros(())
    for row in range(4):
        own = answer_loss(model, batch, row, plan.mask[row])
        for leaves, enters in zip(out[row].tolist(), into[row].tolist(), strict=True):
            runs = plan.mask[row].clone()
            runs[leaves], runs[enters] = runs[enters].item(), runs[leaves].item()
            cost = answer_loss(model, batch, row, runs) - own
            apart = scores[row, leaves] - scores[row, enters]
            total = total + WEIGHTS[row] * (apart - cost).square() / 3
    assert float(total.detach()) > 0.1
    assert_close(loss, total, rtol=1e-3, atol=1e-4)
    total.backward()
    for name, parameter in model.router.named_parameters():
        assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-3)
        assert parameter.grad.abs().max() > 0


def test_a_swap_keeps_the_budget_and_what_always_runs():
    model = tiny_buddy(context_layer=2)
    scores = torch.randn(4, NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
    budgets = torch.tensor([4, 5, 6, 3])  # the last two have nothing to swap
    plan = select_blocks(scores, budgets, pinned=model.policy.pinned)
    out, into = draw_swaps(scores, plan, model.policy, SETTINGS, **DRAWN)
    masks = with_swaps(plan, (out, into))
    assert masks.shape == (4, 4, NUM_BLOCKS)
    assert torch.equal(masks.sum(2), budgets[:, None].expand(4, 4))
    assert bool(masks[:, :, [0, 1, -1]].all())
    assert torch.equal(masks[:, 0], plan.mask)
    apart = (masks[:, 1:] != masks[:, :1]).sum(2)
    assert apart.tolist() == [[2] * 3] * 2 + [[0] * 3] * 2
    assert torch.equal(out[2:], into[2:])


def test_blocks_near_the_boundary_are_drawn_and_at_a_high_temperature_all_are():
    model = tiny_buddy()
    scores = torch.tensor([[0.0, 3.0, -1.0, 1.0, -2.0, 0.0]]).repeat(400, 1)
    plan = select_blocks(scores, torch.full((400,), 4))
    seen = []
    for temperature in (0.01, 100.0):
        settings = dataclasses.replace(SETTINGS, temperature=temperature)
        swaps = draw_swaps(scores, plan, model.policy, settings, places=range(400), seed=1)
        seen.append([set(blocks.flatten().tolist()) for blocks in swaps])
    assert seen == [[{3}, {2}], [{1, 3}, {2, 4}]]
    some = draw_swaps(
        scores[:2], plan.select([0, 1]), model.policy, settings, places=[7, 3], seed=1
    )
    assert torch.equal(some[0], swaps[0][[7, 3]])  # whoever draws
