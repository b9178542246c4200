"""Methods with a gate at each block: parity, fixed masks, caches, hand-worked cases."""

from threading import Thread

import pytest
import torch
from torch.testing import assert_close

from buddy import BuddyForCausalLM
from buddy.depth.policy import NewTokens
from buddy.engine.naive import naive_hidden
from buddy.errors import BudgetError, CheckpointError, PolicyError
from buddy.methods.gated.gates import Gate, Pass
from buddy.methods.gated.recipe import gated_methods
from buddy.settings import build
from tests.product.policies.made import gated
from tests.tiny import NUM_BLOCKS, all_families, random_ids, tiny_model

METHODS = tuple(gated_methods())
# atol: the cache and the gather change the order of sums.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def forced(method, keep):
    """Gates that are sure of themselves: block b is run by every token if `keep[b]`."""
    made = gated(method, scale=0.0)
    part = made.learned
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if name != "bias":
                parameter.zero_()
        for place, block in enumerate(part.governed):
            odds = 40.0 if keep[block] else -40.0
            part.bias[place] = torch.tensor([0.0, odds]) if part.bias.ndim == 2 else odds
    return made


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_gates_that_run_everything_give_full_depth(method):
    ids = random_ids(2, 7)
    full = BuddyForCausalLM(tiny_model(), policy="full", engine="general")
    expected = full(ids).logits
    made = forced(method, [True] * NUM_BLOCKS)
    assert_close(made(ids).logits, expected, **TOLERANCE)
    assert bool(made(ids).lanes.plan.mask.all())
    if method != "mixture-of-depths":  # whose blocks are weighed even where every token runs
        made = gated(method, engine="general")
        made.set_policy(f"{method}:0")
        assert torch.equal(made(ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_gates_that_are_set_to_a_mask_are_that_mask(method):
    keep = [True, True, True, False, True, False]
    made = forced(method, keep)
    skipped = [block for block in made.learned.governed if not keep[block]]
    order = BuddyForCausalLM(
        tiny_model(), policy=f"static:{','.join(map(str, skipped))}", kv_policy=made.kv_policy
    )
    ids = random_ids(2, 7)
    begin = made.learned.sure_tokens  # their first tokens run everything
    out, expected = made(ids), order(ids, budget=f"{NUM_BLOCKS - len(skipped)} blocks")
    runs = out.lanes.plan.mask.view(2, 7, -1)
    assert bool(runs[:, :begin].all())
    assert torch.equal(runs[:, begin:], expected.lanes.plan.mask.view(2, 7, -1)[:, begin:])
    if begin == 0:
        assert_close(out.logits, expected.logits, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("method", ["d-llm", "mixture-of-depths", "flexidepth", "dash"])
def test_cached_decoding_is_what_one_pass_over_everything_gives(method):
    made = gated(method)
    ids = random_ids(2, 12)
    whole = made(ids)
    runs = whole.lanes.plan.mask
    assert 0 < int((~runs).sum()) < runs.numel() // 2
    session, logits = None, []
    for start, stop in ((0, 5), *((at, at + 1) for at in range(5, 12))):
        out = made(ids[:, start:stop], cache=session)
        session = out.cache
        logits.append(out.logits)
    assert_close(torch.cat(logits, 1), whole.logits, **TOLERANCE)


@torch.no_grad()
def test_d_llm_is_the_reference_under_the_masks_that_it_chose():
    made = gated("d-llm")
    ids = random_ids(1, 10)
    out = made(ids)
    expected = naive_hidden(made.backbone, ids[0], out.lanes.plan.mask, "mask")
    assert_close(out.lanes.hidden, expected, **TOLERANCE)


@torch.no_grad()
def test_first_decides_by_the_mean_over_the_prompt_and_keeps_its_mask():
    made = gated("first")
    ids = random_ids(2, 8)
    sees = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]).bool()
    out = made(ids, prompt_mask=sees)
    # By hand: block by block, each row alone, with the blocks before it as they were decided.
    for row in range(2):
        runs = torch.ones(8, NUM_BLOCKS, dtype=torch.bool)
        for block in made.learned.governed:
            cut = runs.clone()
            cut[:, block:] = False
            hidden = naive_hidden(made.backbone, ids[row], cut, "lazy")
            mean = made.learned.probability(block, hidden[sees[row]]).mean()
            runs[:, block] = bool(mean > 0.5)
        assert torch.equal(out.lanes.plan.mask.view(2, 8, -1)[row], runs)
    other = ids.clone()
    other[0, 5:] = ids[0, 5:].flip(0) + 1  # an answer does not change the route
    again = made(other % 97, prompt_mask=sees)
    assert again.lanes.plan == out.lanes.plan
    session = out.cache
    for _ in range(3):
        step = made(random_ids(2, 1), cache=session)
        assert step.plan == out.plan
    assert not bool(out.plan.mask.all())


@torch.no_grad()
def test_first_strict_spends_a_budget_on_the_highest_means():
    made = gated("first")
    made.set_policy("first:strict")
    ids = random_ids(2, 6)
    out = made(ids, budget=["4 blocks", "5 blocks"])
    assert out.executed_blocks.tolist() == [4, 5]
    full = torch.ones(6, NUM_BLOCKS, dtype=torch.bool)
    for row, blocks in ((0, 4), (1, 5)):
        means = []
        for block in made.learned.governed:
            cut = full.clone()
            cut[:, block:] = False
            hidden = naive_hidden(made.backbone, ids[row], cut, "lazy")
            means.append(float(made.learned.probability(block, hidden).mean()))
        best = sorted(sorted(range(4), key=lambda place: -means[place])[: blocks - 2])
        assert out.plan.executed_sets[row] == (0, *(place + 1 for place in best), 5)


@torch.no_grad()
def test_first_strict_holds_all_blocks_for_alike_where_the_route_sees_nothing():
    made = gated("first")
    made.set_policy("first:strict")
    ids, sees = random_ids(2, 5, seed=2), torch.tensor([[True] * 5, [False] * 5])
    seen = made(ids, budget="4 blocks").plan.executed_sets
    assert seen == ((0, 1, 2, 5), (0, 2, 3, 5))
    out = made(ids, budget="4 blocks", prompt_mask=sees)
    assert out.plan.executed_sets == (seen[0], (0, 1, 2, 5))


@torch.no_grad()
def test_flexidepth_weighs_the_mlp_and_passes_others_through_the_adapter():
    made = gated("flexidepth")
    part, backbone = made.learned, made.backbone
    without = tiny_model()  # the same model, whose MLPs give nothing
    for layer in without.model.layers:
        layer.mlp.down_proj.weight.zero_()
    attention = BuddyForCausalLM(without, policy="full").backbone
    ids, positions = random_ids(1, 6), torch.arange(6)[None]
    hidden = backbone.embed(ids)
    rotary = backbone.rotary(hidden, positions)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    for block in range(NUM_BLOCKS):
        after = backbone.run_block(block, hidden, causal, positions, rotary, None)
        if block in part.governed:
            attended = attention.run_block(block, hidden, causal, positions, rotary, None)
            gate = part.probability(block, hidden)[..., None]
            run = attended + gate * (after - attended)
            skip = hidden + (1 - gate) * part.adapter(block, hidden)
            after = torch.where(gate > 0.5, run, skip)
        hidden = after
    assert_close(made(ids).lanes.hidden, hidden[0], **TOLERANCE)


@torch.no_grad()
@all_families
def test_what_flexidepth_weighs_is_what_the_mlp_adds_in_every_family(family):
    backbone = BuddyForCausalLM(tiny_model(family), policy="full").backbone
    positions = torch.arange(6)[None]
    hidden = backbone.embed(random_ids(1, 6))
    rotary = backbone.rotary(hidden, positions)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with backbone.watched_mlp(2) as seen:
        after = backbone.run_block(2, hidden, causal, positions, rotary, None)
    hook = backbone.blocks[2].mlp.register_forward_hook(lambda *call: torch.zeros_like(call[2]))
    without = backbone.run_block(2, hidden, causal, positions, rotary, None)
    hook.remove()
    assert float((after - without).abs().max()) > 0.1
    assert_close(seen[0], after - without, **TOLERANCE)


@torch.no_grad()
def test_what_another_thread_computes_is_not_taken_for_the_mlps_own():
    backbone = BuddyForCausalLM(tiny_model(), policy="full").backbone
    with backbone.watched_mlp(2) as seen:
        other = Thread(target=backbone.blocks[2].mlp, args=(backbone.embed(random_ids(1, 6)),))
        other.start()
        other.join()
        assert seen == []


@torch.no_grad()
def test_mixture_of_depths_weighs_a_block_and_dash_compensates_one():
    for method in ("mixture-of-depths", "dash"):
        made = gated(method)
        part, backbone = made.learned, made.backbone
        ids, positions = random_ids(1, 6), torch.arange(6)[None]
        out = made(ids)
        runs = out.lanes.plan.mask
        hidden = backbone.embed(ids)
        rotary = backbone.rotary(hidden, positions)
        causal = torch.ones(6, 6, dtype=torch.bool).tril()
        for block in range(NUM_BLOCKS):
            keep = runs[:, block]
            sees = causal if part.leaves == "lazy" else causal & (keep | torch.eye(6).bool())
            after = backbone.run_block(block, hidden, sees[None, None], positions, rotary, None)
            if block in part.governed and method == "dash":
                after = torch.where(
                    keep[:, None],
                    after,
                    hidden * (1 + part.scale[block - 1]) + part.shift[block - 1],
                )
            elif block in part.governed:
                weight = 2 * torch.sigmoid(hidden @ part.router[block // 2])[..., None]
                after = torch.where(keep[:, None], hidden + weight * (after - hidden), hidden)
            hidden = after
        assert_close(out.lanes.hidden, hidden[0], **TOLERANCE)


def test_the_odds_of_dash_are_of_the_state_one_gated_block_earlier():
    made = gated("dash")
    part, policy = made.learned, made.policy
    first, second = torch.randn(2, 3, 32)

    place = torch.tensor([0, 0, 0])
    state = policy.begin(NewTokens(place, place + 4, place == 0, [None]))
    assert torch.equal(policy.keep(state, 1, first), part.odds(1, first) > 0)
    assert torch.equal(policy.keep(state, 2, second), part.odds(2, first) > 0)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_keeps_the_gates(method, tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    base = BuddyForCausalLM.from_pretrained(tmp_path / "base")
    made = gated(method)
    base.learned, base.kv_policy = made.learned, made.kv_policy
    base.set_policy(method)
    base.save_pretrained(tmp_path / "made")
    again = BuddyForCausalLM.from_pretrained(tmp_path / "made")
    ids = random_ids(2, 6)
    assert torch.equal(again(ids).logits, base(ids).logits)
    assert again.policy.name == method
    assert again.kv_policy == made.learned.leaves
    assert again.facts()["learned"] == base.facts()["learned"] != made.facts()["base"]


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_be_is_refused_in_one_line(method):
    plain = BuddyForCausalLM(tiny_model(), policy="full")
    with pytest.raises(PolicyError, match=f"no trained part of policy '{method}'") as none:
        plain.set_policy(method)
    made = gated(method)
    with pytest.raises(PolicyError, match="takes a number from 0") as text:
        made.set_policy(f"{method}:1.5")
    with pytest.raises(BudgetError, match="keeps no budget"):
        made(random_ids(1, 4), budget=0.5)
    settings = {**made.learned.to_json()["settings"], "num_blocks": 2}
    with pytest.raises(CheckpointError, match="num_blocks must be") as few:
        build(type(made.learned).settings, settings, "here", CheckpointError)
    deeper = type(made.learned)(
        build(type(made.learned).settings, settings | {"num_blocks": 8}, "here")
    )
    with pytest.raises(PolicyError, match="trained for 8 blocks and the model has 6") as other:
        BuddyForCausalLM(tiny_model(), learned=deeper)
    settings = {**made.learned.to_json()["settings"], "hidden_size": 16}
    narrow = type(made.learned)(build(type(made.learned).settings, settings, "here"))
    with pytest.raises(PolicyError, match="a hidden size of 16 and the model has 32"):
        BuddyForCausalLM(tiny_model(), learned=narrow)
    assert all("\n" not in str(one.value) for one in (none, text, few, other))


def test_the_highest_share_of_a_sequence_passes_a_mixture_of_depths_and_the_predictor_learns_it():
    part = gated("mixture-of-depths", share=0.25).learned
    hidden = torch.randn(2, 8, 32)
    real = torch.arange(8) < torch.tensor([[8], [5]])
    seen = Pass(torch.arange(8), real, real, torch.Generator())
    gate = part.open(1, hidden, seen)
    weight = part.weight(1, hidden).masked_fill(~real, -1)
    assert gate.keep.sum(1).tolist() == [2, 2]  # a quarter of 8, and of 5, rounded up
    for row in range(2):
        assert set(gate.keep[row].nonzero()[:, 0].tolist()) == set(weight[row].topk(2)[1].tolist())
    optimiser = torch.optim.Adam([part.predictor, part.bias], lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        part.open(1, hidden, seen).extra.backward()
        optimiser.step()
    assert torch.equal((part.probability(1, hidden) > 0.5) & real, gate.keep)
    assert isinstance(gate, Gate)
