"""Decode by captured blocks against the general path.

Without a GPU a recording stands in for a CUDA graph: operations are noted once and repeated on the
same memory, and no Python of ours runs.
"""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from buddy import BuddyForCausalLM
from buddy.backbone.backbone import Backbone
from buddy.engine.clock import HostClock
from buddy.engine.executors.graphs import GraphDecoder
from buddy.errors import ModelError
from buddy.lab.evaluation.speed.breakdown import profiled
from tests.product.engine.decoding import decode
from tests.tiny import (
    PECULIAR_FAMILY_NAMES,
    every_family,
    every_kv_policy,
    padded,
    random_ids,
    random_router,
    tiny_model,
)

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


class Recording(TorchDispatchMode):
    """Notes operations with the very tensors that they read and write, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        returns = [value.alias_info for value in operation._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if not is_view:  # what a view shows is written by others
            self.noted.append((operation, args, kwargs or {}, tree_leaves(out)))
        return out

    @torch.no_grad()
    def replay(self):
        for operation, args, kwargs, made in self.noted:
            for old, new in zip(made, tree_leaves(operation(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


def record(work):
    """The operations of a piece of work, to be repeated on the same memory."""
    with Recording() as recording:
        work()
    return recording.replay


def twins(monkeypatch, family="llama", **options):
    """One model twice: captured, and the general path."""
    model = tiny_model(family)
    router = random_router(model, summary="ema", ema_decay=0.5)
    general = BuddyForCausalLM(model, engine="general", router=router, **options)
    graphs = BuddyForCausalLM(model, engine="general", router=router, **options)
    decoder = GraphDecoder(graphs.backbone, record)
    monkeypatch.setattr(graphs.executor, "fast_path", lambda: decoder)
    return graphs, general, decoder


@every_family
@every_kv_policy
def test_a_padded_batch_of_mixed_budgets_equals_the_general_path(monkeypatch, family, kv_policy):
    graphs, general, decoder = twins(monkeypatch, family, kv_policy=kv_policy)
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
    continuation = random_ids(3, 8, seed=5)
    options = {"budget": ["3 blocks", "4 blocks", 1.0]}
    made, plans, _ = decode(graphs, ids, mask, continuation, **options)
    expected, expected_plans, _ = decode(general, ids, mask, continuation, **options)
    assert torch.equal(plans, expected_plans)
    assert len(torch.unique(plans[0], dim=0)) > 1
    assert_close(made, expected, **TOLERANCE)
    assert len(decoder._arenas) == 1


@pytest.mark.parametrize("family", PECULIAR_FAMILY_NAMES)
def test_what_is_peculiar_to_a_family_is_captured_or_refused(monkeypatch, family):
    if Backbone(tiny_model(family)).family.mixture:
        with pytest.raises(ModelError, match="chooses its experts"):
            twins(monkeypatch, family)
        return
    graphs, general, _ = twins(monkeypatch, family, kv_policy="lazy")
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
    continuation = random_ids(3, 8, seed=5)
    options = {"budget": ["3 blocks", "4 blocks", 1.0]}
    made, plans, _ = decode(graphs, ids, mask, continuation, **options)
    expected, expected_plans, _ = decode(general, ids, mask, continuation, **options)
    assert torch.equal(plans, expected_plans)
    assert_close(made, expected, **TOLERANCE)


@every_kv_policy
def test_a_session_may_change_paths_and_outgrow_its_arena(monkeypatch, kv_policy):
    graphs, general, decoder = twins(monkeypatch, kv_policy=kv_policy)
    ids, continuation = random_ids(2, 6), random_ids(2, 24, seed=3)
    mask = torch.ones_like(ids)
    options = {"budget": ["3 blocks", "5 blocks"]}
    expected, _, _ = decode(general, ids, mask, continuation, **options)
    with torch.no_grad():
        session = general.new_session(2, 8, kv_policy)
        out = general(ids, cache=session, **options)
        for step in range(24):
            buddy = general if step % 3 == 0 else graphs
            out = buddy(continuation[:, step : step + 1], cache=out.cache, **options)
            assert_close(out.logits[:, 0], expected[:, step], **TOLERANCE)
    assert session.kv.capacity == 32
    assert len(decoder._arenas) == 1, "what it has outgrown is freed"


@every_kv_policy
def test_an_arena_is_lent_again_when_its_session_is_gone(monkeypatch, kv_policy):
    graphs, general, decoder = twins(monkeypatch, kv_policy=kv_policy)
    for seed in (1, 2):
        ids, continuation = random_ids(1, 6, seed=seed), random_ids(1, 5, seed=10 + seed)
        mask = torch.ones_like(ids)
        made = decode(graphs, ids, mask, continuation, budget="4 blocks")
        expected = decode(general, ids, mask, continuation, budget="4 blocks")
        assert_close(made[0], expected[0], **TOLERANCE)
        del made
    assert len(decoder._arenas) == 1


def test_two_sessions_at_once_do_not_share_an_arena(monkeypatch):
    graphs, general, decoder = twins(monkeypatch)
    prompts = [random_ids(1, 6, seed=seed) for seed in (1, 2)]
    continuation = random_ids(1, 5, seed=9)
    with torch.no_grad():
        sessions = {buddy: [buddy(p, budget=0.7) for p in prompts] for buddy in (graphs, general)}
        for step in range(5):
            token = continuation[:, step : step + 1]
            for at in range(2):
                made = []
                for buddy in (graphs, general):
                    before = sessions[buddy][at].cache
                    out = buddy(token, budget=0.7, cache=before)
                    sessions[buddy][at] = out
                    made.append(out.logits)
                assert_close(*made, **TOLERANCE)
    assert len(decoder._arenas) == 2


@every_kv_policy
def test_beams_reorder_what_an_arena_holds(monkeypatch, kv_policy):
    graphs, general, _ = twins(monkeypatch, kv_policy=kv_policy)
    ids = random_ids(1, 6)
    texts = [
        buddy.generate(ids, budget="4 blocks", num_beams=3, max_new_tokens=8, do_sample=False)
        for buddy in (graphs, general)
    ]
    assert torch.equal(*texts)


def test_an_arena_outlives_inference_mode(monkeypatch):
    graphs, general, decoder = twins(monkeypatch)
    ids, options = random_ids(2, 6), {"budget": "4 blocks", "max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode():
        inside = graphs.generate(ids, **options)
    assert len(decoder._arenas) == 1
    expected = general.generate(ids, **options)
    assert torch.equal(inside, expected)
    assert torch.equal(graphs.generate(ids, **options), expected)
    assert len(decoder._arenas) == 1


def test_angles_that_follow_the_length_are_not_captured():
    model = tiny_model()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(ModelError, match="'dynamic', which changes with the length"):
        GraphDecoder(Backbone(model), record)


@pytest.mark.gpu
@every_kv_policy
def test_on_a_gpu_graphs_equal_the_general_path(kv_policy):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    model = tiny_model("qwen3").cuda()
    router = random_router(model, summary="ema", ema_decay=0.5).cuda()
    ids, mask = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
    continuation = random_ids(3, 8, seed=5).cuda()
    made = []
    for engine in ("auto", "general"):
        buddy = BuddyForCausalLM(model, router=router, kv_policy=kv_policy, engine=engine)
        budgets = ["3 blocks", "4 blocks", 1.0]
        made.append(decode(buddy, ids.cuda(), mask.cuda(), continuation, budget=budgets))
    assert torch.equal(made[0][1], made[1][1])
    assert_close(made[0][0], made[1][0], atol=1e-4, rtol=1e-4)


def test_a_profiler_hears_what_graphs_replay(monkeypatch):
    graphs, _, _ = twins(monkeypatch)
    ids, continuation = random_ids(1, 6), random_ids(1, 3, seed=1)
    with torch.no_grad():
        out = graphs(ids, budget="4 blocks")
        graphs(continuation[:, :1], budget="4 blocks", cache=out.cache)
        with profiled(HostClock()) as profiler:
            graphs(continuation[:, 1:2], budget="4 blocks", cache=out.cache)
    seconds = profiler.breakdown(1.0)
    assert min(seconds["blocks"], seconds["kv_fill"]) > 0
    assert seconds["head"] > 0
