"""Many depths in one pass: the same numbers as one pass a depth, for less work."""

import pytest
import torch
from torch.testing import assert_close

from buddy.data.examples import Example
from buddy.engine.feed import Feed
from buddy.engine.run import run_once
from buddy.training.batches import collate
from buddy.training.predictor.depth_losses import depth_losses
from buddy.training.predictor.shared_prefix import run_shared
from tests.tiny import NUM_BLOCKS, every_family, random_ids, tiny_buddy

DEPTHS = list(range(3, NUM_BLOCKS + 1))


def examples(lengths=((5, 3), (9, 1), (4, 7))):
    made = []
    for seed, (prompt, answer) in enumerate(lengths):
        ids = random_ids(1, prompt + answer, seed=seed)[0].tolist()
        made.append(Example(tuple(ids[:prompt]), tuple(ids[prompt:]), "made"))
    return made


@torch.no_grad()
def depth_losses_naive(backbone, policy, batch, blocks):
    """The executable specification: each depth of each row in a pass of its own."""
    table = torch.zeros(blocks.shape, device=blocks.device)
    for row, depths in enumerate(blocks.tolist()):
        at = batch.rows == row
        length = int(batch.columns[at].max()) + 1
        for place, depth in enumerate(depths):
            token_ids = batch.token_ids[row : row + 1, :length]
            feed = Feed.of_batch(token_ids, router_sees=batch.is_prompt[row : row + 1, :length])
            out = run_once(backbone, policy, feed, ((depth,),))
            logprobs = backbone.logits(out.hidden[batch.columns[at]]).float().log_softmax(1)
            table[row, place] = -logprobs.gather(1, batch.targets[at][:, None]).mean()
    return table


def every_depth(rows):
    return torch.tensor([DEPTHS] * rows)


@every_family
def test_every_depth_of_every_prompt_as_if_run_alone(family):
    buddy = tiny_buddy(family)
    batch = collate(examples())
    blocks = every_depth(3)
    shared = depth_losses(buddy.backbone, buddy.policy, batch, blocks)
    # atol: batches of other sizes sum in another order.
    naive = depth_losses_naive(buddy.backbone, buddy.policy, batch, blocks)
    assert_close(shared, naive, atol=1e-4, rtol=1e-4)
    assert shared.std(1).min() > 0.01, "depth must matter"


@pytest.mark.parametrize(
    ("policy", "planner"),
    [
        ("routed", {"context_layer": 2, "summary": "ema"}),
        ("routed", {"pool": "scores"}),
        ("static:3,1,2,4", {}),
        ("random:5", {}),
    ],
)
def test_whoever_chooses_and_in_any_order_of_depths(policy, planner):
    buddy = tiny_buddy(policy=policy, **planner)
    batch = collate(examples())
    blocks = torch.tensor([[6, 3, 4, 4], [5, 5, 5, 5], [3, 6, 3, 5]])
    shared = depth_losses(buddy.backbone, buddy.policy, batch, blocks)
    naive = depth_losses_naive(buddy.backbone, buddy.policy, batch, blocks)
    assert_close(shared, naive, atol=1e-4, rtol=1e-4)
    assert shared[0, 2] == shared[0, 3]
    assert len(set(shared[1].tolist())) == 1
    assert shared[0, 0] != shared[0, 1]


def test_equal_beginnings_are_run_once():
    """By hand: block 1 is the last to go, 4 the first, so the plans are nested from the front.

    0 and 5 always run. With 3 blocks: 0 1 5; 4: 0 1 2 5; 5: 0 1 2 3 5; 6: all.
    Blocks 0, 1, 2, 3 and 4 run once each, and block 5 for each of the four plans: 9 instead of 18.
    """
    buddy = tiny_buddy(policy="static:4,3,2,1")
    out = run_shared(buddy.backbone, buddy.policy, collate(examples()[:1]), every_depth(1))
    assert out.num_block_runs == 9
    assert out.leaf.unique().tolist() == [0, 1, 2, 3]
    # The other way round nothing is shared but block 0: 1 + 4 + 3 + 2 + 1 of 1 ... 4, and 5.
    buddy.set_policy("static:1,2,3,4")
    out = run_shared(buddy.backbone, buddy.policy, collate(examples()[:1]), every_depth(1))
    assert out.num_block_runs == 1 + (1 + 2 + 3 + 4) + 4


def test_equal_plans_end_in_one_leaf_and_rows_share_nothing():
    buddy = tiny_buddy()
    same = [examples()[0]] * 2
    out = run_shared(buddy.backbone, buddy.policy, collate(same), torch.full((2, 3), 4))
    assert out.leaf.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert out.owner.tolist() == [0, 1]
    assert out.num_block_runs == 8


def test_the_answer_never_reaches_the_route():
    buddy = tiny_buddy()
    plans = {}
    original = buddy.policy.scores

    def scores(state, blocks):
        plans["scores"] = original(state, blocks)
        return plans["scores"]

    buddy.policy.scores = scores
    seen, leaky = [], []
    for seed in range(6):
        answer = tuple(random_ids(1, 5, seed=40 + seed)[0].tolist())
        example = Example((5, 9, 60, 23), answer, "made")
        for kept, into in (
            (example, seen),
            (Example((*example.prompt, *answer[:-1]), answer[-1:], ""), leaky),
        ):
            run_shared(buddy.backbone, buddy.policy, collate([kept]), every_depth(1))
            into.append(plans["scores"])
    for one in seen[1:]:
        assert torch.equal(one, seen[0])
    assert not torch.allclose(leaky[0], leaky[1], atol=1e-3)


def test_many_rows_are_run_in_parts(monkeypatch):
    buddy = tiny_buddy("mistral")
    batch = collate(examples())
    whole = depth_losses(buddy.backbone, buddy.policy, batch, every_depth(3))
    monkeypatch.setattr("buddy.training.predictor.shared_prefix._TOKENS_AT_ONCE", 40)
    parts = depth_losses(buddy.backbone, buddy.policy, batch, every_depth(3))
    assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_no_gradient_is_kept():
    buddy = tiny_buddy()
    losses = depth_losses(buddy.backbone, buddy.policy, collate(examples()), every_depth(3))
    assert not losses.requires_grad
