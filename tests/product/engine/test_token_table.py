"""The token table gives what reading the cache gives."""

import pytest
import torch
from torch.testing import assert_close

from buddy.engine.state.sequence import gather_routes
from buddy.policies.routed import RoutedPolicy
from buddy.policies.tabled import TabledPolicy
from buddy.training.router.lora import add_lora
from buddy.training.router.recipe import LoraSettings
from tests.tiny import all_families, padded, random_ids, tiny_buddy


def route_of(session):
    """What the policy remembers of all sequences, side by side."""
    return gather_routes([sequence.route for sequence in session.sequences.values()])


def routes(buddy, ids, mask, continuation):
    """Scores after the prompt and after each token, read from the cache and by the table."""
    routed = buddy.policy
    with torch.no_grad():
        tabled = buddy.inference_policy()
    assert isinstance(routed, RoutedPolicy)
    assert isinstance(tabled, TabledPolicy)
    found = {}
    for name, policy in (("cache", routed), ("table", tabled)):
        buddy._tabulate = lambda _, policy=policy: policy
        blocks = torch.full((len(ids),), 4)
        with torch.no_grad():
            out = buddy(ids, mask, budget="4 blocks")
            scores = [policy.scores(route_of(out.cache), blocks)]
            for step in range(continuation.shape[1]):
                new = continuation[:, step : step + 1]
                out = buddy(new, budget="4 blocks", cache=out.cache)
                scores.append(policy.scores(route_of(out.cache), blocks))
        found[name] = torch.stack(scores)
    return found


@all_families
@pytest.mark.parametrize(
    ("summary", "side"), [({}, "left"), ({"summary": "ema", "ema_decay": 0.6}, "right")]
)
def test_scores_are_those_read_from_the_cache(family, summary, side):
    buddy = tiny_buddy(family, **summary)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], side)
    found = routes(buddy, ids, mask, random_ids(3, 6, seed=4))
    # atol: the first layer and the pooling change places; scores are of size 1 to 10.
    assert_close(found["table"], found["cache"], atol=2e-4, rtol=1e-4)
    assert found["cache"].std(0).max() > 1e-2


@pytest.mark.parametrize(
    "planner",
    [{"context": "key"}, {"context_layer": 2}, {"summary": "mean+last"}, {"pool": "scores"}],
)
def test_what_no_table_can_stand_for_is_read_from_the_cache(planner):
    buddy = tiny_buddy(**planner)
    with torch.no_grad():
        assert buddy.inference_policy() is buddy.policy


def test_with_gradients_or_an_adapter_the_cache_is_read():
    buddy = tiny_buddy()
    assert buddy.inference_policy() is buddy.policy
    add_lora(buddy.model, LoraSettings(), 0)
    with torch.no_grad():
        assert buddy.inference_policy() is buddy.policy


def test_a_weight_that_changes_makes_a_new_table():
    buddy = tiny_buddy()
    with torch.no_grad():
        first = buddy.inference_policy()
        assert buddy.inference_policy() is first
        buddy.backbone.embedding.weight.mul_(1.5)
        second = buddy.inference_policy()
        assert second is not first
        buddy.router.decision.down.weight.mul_(2)
        third = buddy.inference_policy()
    assert not torch.equal(third.table.rows, second.table.rows)


def test_a_state_read_from_the_cache_is_carried_over():
    buddy = tiny_buddy(summary="ema", ema_decay=0.6)
    ids, more = random_ids(2, 6), random_ids(2, 1, seed=3)
    blocks = torch.full((2,), 4)
    tabulate = buddy._tabulate
    with torch.no_grad():
        buddy._tabulate = lambda policy: policy
        session = buddy(ids, budget="4 blocks").cache
        buddy._tabulate = tabulate
        buddy(more, budget="4 blocks", cache=session)
        carried = buddy.inference_policy().scores(route_of(session), blocks)
        whole = buddy(torch.cat([ids, more], 1), budget="4 blocks").cache
        expected = buddy.inference_policy().scores(route_of(whole), blocks)
    assert_close(carried, expected, atol=2e-4, rtol=1e-4)
