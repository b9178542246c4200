"""The training pass: plans, gates and second routes, each against its slow reference."""

import pytest
import torch
from torch.testing import assert_close

from buddy.depth.plan import DepthPlan
from buddy.engine.feed import Feed
from buddy.engine.naive import naive_hidden
from buddy.engine.run import run_once
from buddy.training.batches import collate
from buddy.training.router import straight_through
from buddy.training.router.choosing import plain_choice, training_choice
from buddy.training.router.recipe import BudgetSettings, RouterSettings
from buddy.training.router.straight_through import (
    Choice,
    StraightThroughRun,
    straight_through_pass,
)
from buddy.training.router.token_depths import token_depths
from tests.product.training.examples import random_examples
from tests.tiny import NUM_BLOCKS, every_family, random_router, tiny_buddy

BUDGETS = torch.tensor([4, 3, 6, 5])


def each(batch):
    """The budgets of the rows, for every token."""
    return BUDGETS[:, None].expand(batch.token_ids.shape)


STEP = 2e-3  # of finite differences: norms are float32 inside, so a smaller one is all noise


@pytest.fixture(scope="module")
def batch():
    return collate(random_examples(4))


@every_family
def test_the_pass_is_that_of_inference_routed_by_the_prompt(family, batch):
    model = tiny_buddy(family)
    choose = plain_choice(model.policy)
    out = straight_through_pass(model.backbone, model.policy, batch, each(batch), choose)
    feed = Feed.of_batch(batch.token_ids, router_sees=batch.is_prompt)
    budgets = [(blocks,) for blocks in BUDGETS.tolist()]
    expected = run_once(model.backbone, model.policy, feed, budgets)
    assert out.lanes_plan == expected.plan
    assert len(set(out.plan.executed_sets)) > 1
    assert torch.equal(out.hidden.flatten(0, 1), expected.hidden)


def test_the_answer_does_not_change_the_route(batch):
    model = tiny_buddy()
    changed = collate(random_examples(4))
    changed.token_ids[~batch.is_prompt] = 5
    plans = [
        straight_through_pass(
            model.backbone, model.policy, one, each(one), plain_choice(model.policy)
        ).plan
        for one in (batch, changed)
    ]
    assert plans[0] == plans[1]


class FixedGates:
    """A plan and gates that a test can move."""

    def __init__(self, plan, gates):
        self.plan, self.gates = plan, gates

    def __call__(self, scores, rows, budgets):
        return Choice(self.plan, gates=self.gates)


def gate_gradient(model, batch, plan, dense):
    gates = torch.full(plan.mask.shape, 0.3, requires_grad=True)
    choose = FixedGates(plan, gates)
    out = straight_through_pass(
        model.backbone, model.policy, batch, each(batch), choose, is_dense=dense
    )
    hidden = out.hidden[batch.rows, batch.columns]
    hidden.square().mean().backward()
    return hidden.detach(), gates.grad


def scaled_loss(model, batch, plan, row, block, factor):
    """The loss when what one block does to one row is added `factor` times more."""
    backbone = model.backbone
    own = backbone.run_block

    def run_block(at, hidden, *rest):
        out = own(at, hidden, *rest)
        if at != block:
            return out
        share = torch.zeros(len(hidden), 1, 1)
        share[int(plan.mask[:row, block].sum())] = factor  # its place among the rows that run
        return out + share * (out - hidden)

    backbone.run_block = run_block
    try:
        out = straight_through_pass(
            backbone, model.policy, batch, each(batch), FixedGates(plan, None)
        )
    finally:
        backbone.run_block = own
    return out.hidden[batch.rows, batch.columns].square().mean()


@pytest.mark.parametrize("dense", [False, True])
def test_the_straight_through_gradient_is_that_of_a_scaled_block(batch, dense):
    model = tiny_buddy()
    model.model.double()
    mask = torch.rand(4, NUM_BLOCKS, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, [0, -1]] = True
    mask[:, 2], mask[0, 2] = True, False
    plan = DepthPlan(mask)
    hidden, slope = gate_gradient(model, batch, plan, dense)
    with torch.no_grad():
        plain = straight_through_pass(
            model.backbone, model.policy, batch, each(batch), FixedGates(plan, None)
        ).hidden[batch.rows, batch.columns]
    assert torch.equal(hidden, plain)  # a gate changes no value
    step = STEP
    for row, block in [(1, 2), (0, 1), (2, 3), (3, 4)]:
        if not mask[row, block]:
            assert (slope[row, block] == 0) == (not dense)
            continue
        with torch.no_grad():
            change = [scaled_loss(model, batch, plan, row, block, s) for s in (step, -step)]
        assert_close(
            slope[row, block].double(), (change[0] - change[1]) / (2 * step), rtol=5e-3, atol=1e-6
        )
    assert slope[:, 1:-1][mask[:, 1:-1]].abs().min() > 0


def test_dense_gates_of_skipped_blocks_point_along_the_block(batch):
    model = tiny_buddy()
    model.model.double()
    mask = torch.ones(4, NUM_BLOCKS, dtype=torch.bool)
    mask[0, 3] = False
    plan = DepthPlan(mask)
    _, slope = gate_gradient(model, batch, plan, True)
    step = STEP
    own = model.backbone.run_block

    def loss(factor):
        def run_block(at, hidden, *rest):
            out = own(at, hidden, *rest)
            if at != 3:
                return out
            kept = torch.ones(len(hidden), 1, 1, dtype=torch.float64)
            kept[0] = factor
            return hidden + kept * (out - hidden)

        model.backbone.run_block = run_block
        everyone = FixedGates(DepthPlan(torch.ones_like(mask)), None)
        with torch.no_grad():
            out = straight_through_pass(model.backbone, model.policy, batch, each(batch), everyone)
        model.backbone.run_block = own
        return out.hidden[batch.rows, batch.columns].square().mean()

    by_hand = (loss(step) - loss(-step)) / (2 * step)
    assert_close(slope[0, 3].double(), by_hand, rtol=5e-3, atol=1e-7)
    assert abs(float(by_hand)) > 1e-6


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_second_route_is_that_of_re_routing_in_decode(family, batch):
    model = tiny_buddy(family)
    width = batch.token_ids.shape[1]
    second = torch.tensor([int(batch.is_prompt[row].sum()) + row for row in range(3)] + [width])
    out = straight_through_pass(
        model.backbone,
        model.policy,
        batch,
        each(batch),
        plain_choice(model.policy),
        second_from=second,
    )
    changed = 0
    for row in range(4):
        prompt, after = int(batch.is_prompt[row].sum()), int(second[row])
        length = int(batch.columns[batch.rows == row].max()) + 1
        ids = batch.token_ids[row, :length]
        counts = (prompt, after + 1 if after < length else length)
        plans = [plan_of(model, ids[:count], int(BUDGETS[row])) for count in counts]
        changed += not torch.equal(plans[0], plans[1])
        runs = plans[0].expand(length, -1).clone()
        if after < length:
            runs[after:] = plans[1]
        expected = naive_hidden(model.backbone, ids, runs, "project")
        # Sums in another order: the reference runs one row, and every block for every token.
        assert_close(out.hidden[row, :length], expected, atol=2e-4, rtol=1e-4)
    assert changed


def plan_of(model, ids, blocks):
    out = model(ids[None], budget=f"{blocks} blocks", use_cache=False)
    return out.plan.mask[0]


def test_gradients_reach_the_router_through_the_choice(batch):
    model = tiny_buddy()
    model.router.requires_grad_(True)
    choose = training_choice(
        RouterSettings(relaxation="scaled-softmax"), model.policy, places=range(4), seed=0
    )
    out = straight_through_pass(model.backbone, model.policy, batch, each(batch), choose)
    out.hidden[batch.rows, batch.columns].square().mean().backward()
    for name, parameter in model.router.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("layer", [1, 2])
def test_gates_stand_at_the_blocks_that_are_not_pinned(batch, layer):
    model = tiny_buddy(context_layer=layer)
    settings = RouterSettings(relaxation="sigmoid", temperature=100.0)
    choose = training_choice(settings, model.policy, places=range(4), seed=0)
    scores = model.policy.scores(
        model.policy.observe(None, observation(model, batch, layer)), BUDGETS
    )
    gates = choose(scores, torch.arange(4), BUDGETS).gates
    assert bool((gates[:, layer:-1] > 0).all())
    assert bool((gates[:, [*range(layer), -1]] == 0).all())


def observation(model, batch, layer):
    from buddy.depth.policy import Observation

    width = model.backbone.kv_width
    torch.manual_seed(0)
    keys, values = torch.randn(2, *batch.token_ids.shape, width)
    return Observation(batch.token_ids, batch.is_prompt, keys, values)


def test_random_router_is_what_the_tests_above_need():
    # Its plans differ between prompts; else the tests of routes would say nothing.
    assert random_router(tiny_buddy().model).decision.up.weight.abs().max() > 1


def mixed_depths(batch, seed=0):
    """A depth of its own for every token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, NUM_BLOCKS + 1, batch.token_ids.shape, generator=generator)


def by_token(model, batch, depths, row):
    """Tokens and plans of one row, as the reference wants them: routed by the prompt alone."""
    prompt = int(batch.is_prompt[row].sum())
    length = int(batch.columns[batch.rows == row].max()) + 1
    ids = batch.token_ids[row, :length]
    plans = {d: plan_of(model, ids[:prompt], d) for d in range(3, NUM_BLOCKS + 1)}
    return ids, torch.stack([plans[int(depth)] for depth in depths[row, :length]])


@every_family
def test_tokens_of_mixed_depths_equal_the_naive_reference(family, batch):
    model = tiny_buddy(family)
    depths = mixed_depths(batch)
    choose = plain_choice(model.policy)
    out = straight_through_pass(model.backbone, model.policy, batch, depths, choose)
    ran = out.lanes_plan.mask.view(*batch.token_ids.shape, -1)
    for row in range(4):
        ids, runs = by_token(model, batch, depths, row)
        assert torch.equal(ran[row, : len(ids)], runs)
        expected = naive_hidden(model.backbone, ids, runs, "project")
        assert_close(out.hidden[row, : len(ids)], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_of_mixed_depths_equal_those_of_the_naive_reference(family, batch):
    model = tiny_buddy(family)
    model.model.double()
    depths = mixed_depths(batch, seed=1)
    weights = [p for name, p in model.model.named_parameters() if "layers.2" in name]

    def slopes(loss):
        return torch.autograd.grad(loss, weights)

    choose = plain_choice(model.policy)
    out = straight_through_pass(model.backbone, model.policy, batch, depths, choose)
    made = slopes(out.hidden[batch.rows, batch.columns].square().sum())
    total = 0
    for row in range(4):
        ids, runs = by_token(model, batch, depths, row)
        hidden = naive_hidden(model.backbone, ids, runs, "project")
        total = total + hidden[batch.columns[batch.rows == row]].square().sum()
    for one, other in zip(made, slopes(total), strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert one.abs().max() > 0


def tokens_computed(model, monkeypatch):
    """A list to which every block that runs adds how many tokens it computes."""
    computed = []
    own = model.backbone.run_block
    monkeypatch.setattr(
        model.backbone,
        "run_block",
        lambda block, hidden, *rest: (
            computed.append(hidden.shape[:2].numel()) or own(block, hidden, *rest)
        ),
    )
    return computed


def test_tokens_that_skip_a_block_are_not_computed(batch, monkeypatch):
    model = tiny_buddy()
    depths = mixed_depths(batch)
    computed = tokens_computed(model, monkeypatch)
    choose = plain_choice(model.policy)
    out = straight_through_pass(model.backbone, model.policy, batch, depths, choose)
    ran = out.lanes_plan.host.reshape(*batch.token_ids.shape, -1).sum(1)  # [batch, blocks]
    assert ran.sum() <= sum(computed) < batch.token_ids.numel() * NUM_BLOCKS
    # The rows in which a token runs the block, as wide as the one in which most do.
    assert computed == [int((row > 0).sum() * row.max()) for row in ran.T if row.any()]


@pytest.mark.parametrize("ran", [True, False])
def test_the_straight_through_gradient_of_tokens_is_that_of_scaled_blocks(batch, ran):
    model = tiny_buddy()
    model.model.double()
    depths = mixed_depths(batch, seed=2)
    choose = plain_choice(model.policy)
    plan = None

    def gated(scores, rows, budgets):
        nonlocal plan
        plan = choose(scores, rows, budgets).plan
        gates = torch.full(plan.mask.shape, 0.3, requires_grad=True)
        gated.gates, gated.rows = gates, rows
        return Choice(plan, gates=gates)

    out = straight_through_pass(
        model.backbone, model.policy, batch, depths, gated, is_dense=not ran
    )
    out.hidden[batch.rows, batch.columns].square().mean().backward()
    slope = gated.gates.grad
    is_kind = plan.mask[:, 1:-1] == ran
    which, block = (is_kind & (slope[:, 1:-1].abs() > 1e-6)).nonzero()[3]
    block = int(block) + 1
    lanes = torch.from_numpy((out.lanes_plan.host == plan.host[int(which)]).all(1)).view(
        batch.token_ids.shape
    )
    lanes[torch.arange(4) != int(gated.rows[which])] = False

    def loss(factor):
        class Scaled(StraightThroughRun):
            def one_block(self, at, run, skip):
                before, whole = self.hidden, self.lanes.whole
                done = whole.merge(before, self.run_frame(at, whole, None)) - before
                super().one_block(at, run, skip)
                if at == block:
                    share = factor * lanes.flatten()[:, None]
                    self.hidden = self.hidden + share * done

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(straight_through, "StraightThroughRun", Scaled)
            out = straight_through_pass(model.backbone, model.policy, batch, depths, choose)
        return out.hidden[batch.rows, batch.columns].square().mean()

    by_hand = (loss(STEP) - loss(-STEP)) / (2 * STEP)
    assert_close(slope[which, block].double(), by_hand, rtol=5e-3, atol=1e-6)


def test_gates_of_skipped_blocks_cost_the_sequences_that_skip_and_no_others(batch, monkeypatch):
    model = tiny_buddy()
    mask = torch.ones(4, NUM_BLOCKS, dtype=torch.bool)
    mask[0, 2] = mask[3, 2] = False
    computed = tokens_computed(model, monkeypatch)
    gate_gradient(model, batch, DepthPlan(mask), True)
    whole, half = batch.token_ids.numel(), batch.token_ids.numel() // 2
    assert computed == [whole, whole, half, half, whole, whole, whole]


def test_prompts_run_full_and_answers_change_their_depth_as_the_recipe_says(batch):
    settings = BudgetSettings(full_prompts=1.0, mixed_answers=1.0, stretch=2)
    budgets = torch.tensor([3, 3, 3, 3])
    arguments = (settings, batch, budgets, (3, 4, 5), NUM_BLOCKS, range(4), 7)
    depths = token_depths(*arguments)
    assert torch.equal(depths, token_depths(*arguments))
    assert bool((depths[batch.is_prompt] == NUM_BLOCKS).all())
    answers = depths[batch.rows, batch.columns + 1]
    assert set(answers.tolist()) == {3, 4, 5}
    plain = token_depths(BudgetSettings(), *arguments[1:])
    assert bool((plain == 3).all())
