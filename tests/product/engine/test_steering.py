"""Methods that are asked before a block: one loop, and the laws of lanes."""

import shutil

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.depth.policy import OnlinePolicy
from buddy.engine.naive import naive_hidden
from buddy.errors import BudgetError
from tests.tiny import NUM_BLOCKS, every_kv_policy, random_ids, tiny_model

# atol: the cache and the gather change the order of sums.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


class ByNorm(OnlinePolicy):
    """Runs a governed block for the tokens whose residual is small; each block sees its own."""

    name = "by-norm"
    num_blocks = NUM_BLOCKS

    def __init__(self, governed, share=0.5):
        self.governed, self.share = governed, share
        self.asked = []

    def begin(self, new):
        self.asked.append([])
        return {"lanes": len(new)}

    def keep(self, state, block, hidden):
        assert len(hidden) == state["lanes"]
        self.asked[-1].append(block)
        size = hidden.float().norm(dim=1)
        # A rule for each token alone, so that the reference can ask it of any prefix.
        return (size * 1000).long() % 100 < 100 * self.share

    def describe(self):
        return "by norm"


class EarlyExit(ByNorm):
    """No block from `exit` on runs: the exit of LayerSkip at a fixed block."""

    name = "exit"

    def __init__(self, at):
        super().__init__(range(at, NUM_BLOCKS))

    def keep(self, state, block, hidden):
        return torch.zeros(len(hidden), dtype=torch.bool)


def reference(buddy, policy, ids, runs_before, kv_policy):
    """Runs of the last token, asked of the reference block by block, and its residual."""
    runs = torch.cat([runs_before, torch.ones(1, NUM_BLOCKS, dtype=torch.bool)])
    for block in policy.governed:
        cut = runs.clone()
        cut[:, block:] = False  # the residual that enters the block
        hidden = naive_hidden(buddy.backbone, ids, cut, kv_policy)
        runs[-1, block] = bool(policy.keep({"lanes": 1}, block, hidden[-1:])[0])
    return runs, naive_hidden(buddy.backbone, ids, runs, kv_policy)[-1]


@pytest.mark.parametrize("engine", ["general", "native"])
@every_kv_policy
@torch.no_grad()
def test_a_policy_that_is_asked_before_blocks_equals_the_reference(engine, kv_policy):
    if engine == "native" and shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    policy = ByNorm((1, 3, 4))
    buddy = BuddyForCausalLM(tiny_model(), policy=policy, kv_policy=kv_policy, engine=engine)
    ids = random_ids(1, 12)
    out = buddy(ids[:, :5])
    runs = out.lanes.plan.mask
    assert 0 < int((~runs).sum()) < runs.numel()
    assert bool(runs[:, [0, 2, 5]].all())
    for step in range(5, 12):
        policy.asked.clear()
        out = buddy(ids[:, step : step + 1], cache=out.cache)
        assert policy.asked == [[1, 3, 4]]
        policy.asked.append([])
        expected_runs, expected = reference(buddy, policy, ids[0, : step + 1], runs, kv_policy)
        assert torch.equal(out.lanes.plan.mask[0], expected_runs[-1])
        assert_close(out.lanes.hidden[0], expected, **TOLERANCE)
        assert out.executed_blocks.tolist() == out.plan.depth.tolist()
        runs = expected_runs


@torch.no_grad()
def test_an_exit_at_a_block_is_the_model_without_the_blocks_after_it():
    buddy = BuddyForCausalLM(tiny_model(), policy=EarlyExit(4))
    order = BuddyForCausalLM(tiny_model(), policy="static:4,5")
    ids = random_ids(2, 7)
    made, expected = buddy(ids), order(ids, budget="4 blocks")
    assert_close(made.logits, expected.logits, **TOLERANCE)
    texts = [
        model.generate(ids, max_new_tokens=6, do_sample=False, **options)
        for model, options in ((buddy, {}), (order, {"budget": "4 blocks"}))
    ]
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_policy_that_runs_everything_gives_full_depth():
    model = tiny_model("qwen3")
    buddy = BuddyForCausalLM(model, policy=ByNorm((1, 2, 3), share=1.0))
    ids = random_ids(2, 7)
    assert torch.equal(buddy(ids).logits, BuddyForCausalLM(model, policy="full")(ids).logits)


def test_gradients_flow_through_an_online_policy():
    buddy = BuddyForCausalLM(tiny_model(), policy=ByNorm((1, 2, 3)))
    out = buddy(random_ids(1, 6))
    out.logits.sum().backward()
    assert bool(out.lanes.plan.mask[:, 1:4].any())
    assert buddy.model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


def test_a_budget_below_full_depth_is_refused_where_none_is_kept():
    buddy = BuddyForCausalLM(tiny_model(), policy=ByNorm((1, 2)))
    with pytest.raises(BudgetError, match="keeps no budget"):
        buddy(random_ids(1, 4), budget="4 blocks")


class Dimmed(ByNorm):
    """Halves what a governed block adds, and what a token keeps that skips it."""

    def adjust_output(self, state, block, before, run):
        return (run.hidden + before) / 2 * 0.75


@torch.no_grad()
def test_what_a_policy_leaves_in_the_residual_is_what_later_blocks_and_steps_see():
    policy = Dimmed((1, 3, 5), share=0.5)
    buddy = BuddyForCausalLM(tiny_model(), policy=policy)
    ids = random_ids(1, 9)
    whole = buddy(ids)
    session, stepped = None, []
    for step in range(9):
        out = buddy(ids[:, step : step + 1], cache=session, use_cache=True)
        session = out.cache
        stepped.append(out.logits[0, -1])
        assert out.lanes.engine == "general"
    assert_close(torch.stack(stepped), whole.logits[0], **TOLERANCE)
    other = BuddyForCausalLM(tiny_model(), policy=ByNorm((1, 3, 5)))(ids)
    assert not torch.allclose(other.logits, whole.logits, **TOLERANCE)


@torch.no_grad()
def test_a_policy_is_told_of_sequences_places_and_what_ran_before():
    told = []

    class Told(ByNorm):
        def begin(self, new):
            told.append(new)
            return super().begin(new)

    buddy = BuddyForCausalLM(tiny_model(), policy=Told((1, 3)))
    out = buddy(random_ids(2, 4), prompt_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool())
    buddy(random_ids(2, 1), cache=out.cache)
    first, second = told
    assert first.sequence.tolist() == [0] * 4 + [1] * 4
    assert first.position.tolist() == [0, 1, 2, 3] * 2
    assert first.router_sees.tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert first.last_runs == [None, None]
    assert second.position.tolist() == [4, 4]
    last = out.plan.host
    assert [runs.tolist() for runs in second.last_runs] == last.tolist()
