"""One suite for every policy."""

import json

import pytest
import torch

from buddy.depth.policy import Observation, PolicyResources
from buddy.depth.prior import Prior
from buddy.depth.select import select_blocks
from buddy.errors import BudgetError, PolicyError
from buddy.policies.registry import build_policy, methods, policy_names
from buddy.policies.searched import SearchedPolicy
from buddy.policies.static import StaticPolicy
from tests.product.policies.made import random_pudding
from tests.tiny import NUM_BLOCKS, random_router, tiny_model

SPECS = {
    "full": "full",
    "pudding": "pudding",
    "layerskip": "layerskip",
    "random": "random:3",
    "static": "static",
    "routed": "routed",
    "searched": "searched:RECORD",
}
ONLINE = {method.name for method in methods() if not method.keeps_budget}
"""They decide while they run, and score no blocks: tests of their own have their laws."""
SETS = {"3": [0, 4, 5], "5": [0, 1, 2, 3, 5]}
ORDER = [4, 1, 3, 2]


@pytest.fixture(scope="module")
def resources():
    return PolicyResources(
        num_blocks=NUM_BLOCKS,
        prior=Prior(torch.tensor([0.4, 0.1, 0.3, 0.2])),
        router=random_router(tiny_model()),
        learned=random_pudding(),
    )


def observation(rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, rows, tokens, 16, generator=generator)
    ids = torch.randint(0, 97, (rows, tokens), generator=generator)
    return Observation(ids, torch.ones(rows, tokens, dtype=torch.bool), kv[0], kv[1])


def test_every_registered_policy_is_tested():
    assert set(SPECS) | ONLINE == set(policy_names())


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "sets.json"
    results = {"sets": SETS, "removal_order": ORDER}
    path.write_text(json.dumps({"kind": "searched", "config": {}, "results": results}))
    return path


@pytest.mark.parametrize("name", SPECS)
def test_a_policy_scores_every_row_the_same_alone_and_in_a_batch(name, resources, record):
    policy = build_policy(SPECS[name].replace("RECORD", str(record)), resources)
    seen, more = observation(3, 5), observation(3, 1, seed=1)
    batch = policy.observe(policy.observe(None, seen), more)
    blocks = torch.full((3,), NUM_BLOCKS if name == "full" else 4)
    scores = policy.scores(batch, blocks)
    assert scores.shape == (3, NUM_BLOCKS)
    plan = select_blocks(scores, blocks, pinned=policy.pinned)
    picked = policy.scores(batch.select_rows(torch.tensor([2, 0])), blocks[:2])
    assert torch.equal(picked, scores[[2, 0]])
    for row in range(3):
        alone = policy.observe(None, _row(seen, row))
        alone = policy.observe(alone, _row(more, row))
        mine = select_blocks(policy.scores(alone, blocks[:1]), blocks[:1], pinned=policy.pinned)
        assert mine.executed_sets[0] == plan.executed_sets[row]
    assert policy.describe()


def _row(seen, row):
    at = slice(row, row + 1)
    return Observation(seen.token_ids[at], seen.router_sees[at], seen.keys[at], seen.values[at])


def test_static_follows_the_prior(resources):
    policy = build_policy("static", resources)
    assert policy.removal_order == (2, 4, 3, 1)


def test_static_ties_remove_the_deeper_block_first():
    assert StaticPolicy(Prior(torch.zeros(4)), 6).removal_order == (4, 3, 2, 1)


def test_a_static_set_is_never_exceeded(resources):
    policy = build_policy("static:2,3", resources)
    scores = policy.scores(policy.observe(None, observation(1, 2)), torch.tensor([4]))
    four, five = (
        select_blocks(scores, torch.tensor([blocks]), pinned=policy.pinned).executed_sets
        for blocks in (4, 5)
    )
    assert four == ((0, 1, 4, 5),)
    assert five == ((0, 1, 3, 4, 5),)
    with pytest.raises(BudgetError, match="4 of the 6 blocks always run"):
        select_blocks(scores, torch.tensor([3]), pinned=policy.pinned)


def blocks_of(policy, *budgets):
    """What runs at these budgets, in one batch."""
    state, blocks = policy.observe(None, observation(len(budgets), 2)), torch.tensor(budgets)
    return select_blocks(policy.scores(state, blocks), blocks, pinned=policy.pinned).executed_sets


def test_searched_sets_run_at_their_depths_and_grow_between_them(resources, record):
    policy = build_policy(f"searched:{record}", resources)
    assert policy.pinned == (0, 5)
    # 2: no smaller set, so the order alone. 4: the set of 3, and the last block to go. 5: a set
    # that the one of 3 is no part of. 6: all.
    assert blocks_of(policy, 2, 3, 4, 5, 6) == (
        (0, 5),
        (0, 4, 5),
        (0, 2, 4, 5),
        (0, 1, 2, 3, 5),
        (0, 1, 2, 3, 4, 5),
    )
    assert blocks_of(policy, 5) == ((0, 1, 2, 3, 5),)
    one = SearchedPolicy({5: [0, 1, 2, 4, 5]}, ORDER, NUM_BLOCKS)
    assert blocks_of(one, 3, 4, 5) == ((0, 2, 5), (0, 2, 3, 5), (0, 1, 2, 4, 5))
    assert policy.describe() == "searched sets of 3, 5 blocks, searched sets.json"


def test_searched_sets_that_are_written_out_run_alike(resources, record):
    policy = build_policy(f"searched:{record}", resources)
    written = build_policy(policy.written(), resources)
    assert written.written() == policy.written()
    assert blocks_of(written, 2, 3, 4, 5, 6) == blocks_of(policy, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ("sets", "order", "says"),
    [
        ({3: [0, 5]}, ORDER, "must name 3 blocks"),
        ({3: [0, 5, 5]}, ORDER, "each once"),
        ({3: [0, 5, 6]}, ORDER, "from 0 to 5"),
        ({3: [0, 1, 2]}, ORDER, "lacks block 5"),
        ({4: [0, 1, 4, 5]}, [1, 4], "lacks block 2"),
        ({3: [0, 4, 5]}, [4, 4], "each block once"),
    ],
)
def test_a_searched_set_that_is_no_set_of_its_depth_is_refused(sets, order, says):
    with pytest.raises(PolicyError, match=says):
        SearchedPolicy(sets, order, NUM_BLOCKS)


@pytest.mark.parametrize(
    "results",
    [
        {"removal_order": ORDER},
        {"sets": SETS},
        {"sets": {}, "removal_order": ORDER},
        {"sets": {"three": [0, 4, 5]}, "removal_order": ORDER},
        {"sets": [[0, 4, 5]], "removal_order": ORDER},
    ],
)
def test_a_record_without_searched_sets_is_refused(resources, tmp_path, results):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"kind": "searched", "config": {}, "results": results}))
    with pytest.raises(PolicyError, match="no sets and removal_order"):
        build_policy(f"searched:{path}", resources)


def test_random_depends_on_seed_tokens_and_step_but_not_on_pads(resources):
    seen = observation(1, 6)
    ids, router_sees = seen.token_ids, seen.router_sees

    def scores(seed, ids, router_sees):
        policy = build_policy(f"random:{seed}", resources)
        state = policy.observe(None, Observation(ids, router_sees))
        return policy.scores(state, torch.tensor([4]))

    base = scores(1, ids, router_sees)
    assert torch.equal(base, scores(1, ids, router_sees))
    assert not torch.equal(base, scores(2, ids, router_sees))
    assert not torch.equal(base, scores(1, ids.flip(1), router_sees))
    assert not torch.equal(base, scores(1, ids[:, :-1], router_sees[:, :-1]))
    padded = torch.nn.functional.pad(ids, (3, 2), value=9)
    assert torch.equal(base, scores(1, padded, torch.nn.functional.pad(router_sees, (3, 2))))


def test_random_scores_are_uniform_over_blocks(resources):
    policy = build_policy("random", resources)
    ids = torch.arange(4000)[:, None]
    state = policy.observe(None, Observation(ids, torch.ones_like(ids, dtype=torch.bool)))
    blocks = torch.full((4000,), 4)
    rates = select_blocks(policy.scores(state, blocks), blocks).mask.float().mean(0)
    # Each of 4 middle blocks runs in half the plans; 4000 draws have a standard error of 0.008.
    assert torch.allclose(rates[1:-1], torch.tensor(0.5), atol=0.04)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nonsense", f"expected one of {', '.join(policy_names())}"),
        ("layerskip:3", "its exit is the budget"),
        ("random:x", "whole number"),
        ("static:1,x", "block numbers"),
        ("static:1,1", "each block once"),
        ("static:9", "from 0 to 5"),
        ("searched", "takes a record"),
        ("searched:3,1", "takes a record"),
        ("searched:4,1,2,3;3@0,x,5", "takes a record"),
        ("searched:4,1,2,3;3@0,4,5;3@0,4,5", "takes a record"),
        ("searched:4,1,2,3;3@0,4", "must name 3 blocks"),
        ("full:1", "no argument"),
        ("routed:1", "no argument"),
    ],
)
def test_a_bad_name_or_argument_is_refused(spec, says, resources):
    with pytest.raises(PolicyError, match=says):
        build_policy(spec, resources)


def test_what_a_model_lacks_is_named():
    bare = PolicyResources(num_blocks=NUM_BLOCKS)
    with pytest.raises(PolicyError, match="no prior to order its blocks by"):
        build_policy("static", bare)
    with pytest.raises(PolicyError, match="no trained router"):
        build_policy("routed", bare)
