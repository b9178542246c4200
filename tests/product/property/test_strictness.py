"""Budget strict: for any scores, ties, budgets and row mix, at every step."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from buddy import BuddyForCausalLM
from buddy.depth.policy import BatchSize, DepthPolicy
from tests.tiny import NUM_BLOCKS, random_ids, tiny_model

MODEL = tiny_model("qwen3")


class ScriptedPolicy(DepthPolicy):
    """Scores drawn by hypothesis, new ones at each step."""

    name = "scripted"
    num_blocks = NUM_BLOCKS
    pinned = (0, -1)
    context_layer = 0

    def __init__(self, script):
        self.script = list(script)

    def observe(self, state, seen):
        return BatchSize.of(seen)

    def scores(self, state, blocks):
        return torch.tensor(self.script.pop(0))

    def describe(self):
        return "scripted"


def count_block_calls(model):
    """Rows that enter each Hugging Face block: counted in the model, not by the engine."""
    counts = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
        for layer in model.model.layers
    ]
    return counts, hooks


ties = st.sampled_from([-1.0, 0.0, 0.0, 1.0, float("inf"), -float("inf")])


@st.composite
def scripts(draw):
    rows = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4))
    budgets = draw(st.lists(st.integers(3, NUM_BLOCKS), min_size=rows, max_size=rows))
    row = st.lists(ties, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
    batch = st.lists(row, min_size=rows, max_size=rows)
    return budgets, draw(st.lists(batch, min_size=steps, max_size=steps))


@settings(max_examples=60, deadline=None)
@given(scripts(), st.sampled_from(["zero", "mask", "project", "lazy"]))
def test_executed_blocks_equal_the_budget_at_every_step(script, kv_policy):
    budgets, scores = script
    policy = ScriptedPolicy(scores)
    # The kernel calls no module; tests/product/engine/test_native.py counts what it runs.
    buddy = BuddyForCausalLM(MODEL, policy=policy, kv_policy=kv_policy, engine="general")
    counts, hooks = count_block_calls(MODEL)
    ids = random_ids(len(budgets), 3 + len(scores))
    try:
        session = None
        for step in range(len(scores)):
            new = ids[:, :3] if step == 0 else ids[:, 2 + step : 3 + step]
            counts.clear()
            with torch.no_grad():
                out = buddy(new, budget=[f"{b} blocks" for b in budgets], cache=session)
            session = out.cache
            assert out.executed_blocks.tolist() == budgets
            assert sum(counts) == sum(budgets)
            assert bool(out.logits.isfinite().all())
    finally:
        for hook in hooks:
            hook.remove()
