"""A model whose blocks lie on several GPUs, pretended: one's tokens, and no move but for runs."""

import copy
import itertools

import pytest
import torch

from buddy import BuddyForCausalLM, DepthTrace
from buddy.errors import ModelError
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.measure import measure
from buddy.serving.rows import calibrate
from tests.pretend import OnDevice, PretendDevice, move
from tests.product.generation.test_exit_drafts import exits_at_once
from tests.product.policies.made import gated
from tests.product.serving.made import byte_buddy, prompts, request
from tests.product.serving.test_on_device import served
from tests.spread import PLACES, moves_of, spread
from tests.tiny import every_kv_policy, padded, random_ids, some_families, tiny_buddy

PROMPTS, MASK = padded([random_ids(1, n, seed=n)[0] for n in (3, 9, 6)], "left")
ROWS = {"inputs": PROMPTS, "attention_mask": MASK}
ALONE = {"inputs": PROMPTS[1:2]}


def generated(buddy, **options):
    """Tokens, and what each step ran."""
    trace = DepthTrace()
    torch.manual_seed(0)
    made = buddy.generate(**{"max_new_tokens": 4, "do_sample": False} | options, trace=trace)
    return made, [step.plans for step in trace.steps]


def assert_same_tokens(make, **options):
    buddy, (expected, ran) = make(), generated(make(), **options)
    with PretendDevice() as device:
        made, ran_there = generated(spread(buddy), **options)
    assert isinstance(made, OnDevice)
    assert (made.gpu, made.tolist(), ran_there) == (0, expected.tolist(), ran)
    assert device.moves


FORMS = {
    "greedy": ROWS | {"budget": [0.5, 0.7, 1.0]},
    "every-other-step": ROWS | {"budget": 0.7, "reroute": 2},
    "auto": ROWS | {"budget": ["auto", 0.6, "auto"]},
    "sampled": ROWS | {"budget": 0.7, "do_sample": True, "top_p": 0.9, "batch_route": "shared"},
    "beams": ROWS | {"budget": [0.5, 0.7, 1.0], "num_beams": 2},
    "drafts": ALONE | {"draft_budget": 0.5},
    "row-drafts": ROWS | {"budget": [0.7, 0.8, 1.0], "drafts": "ngram+0.5"},
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_decoding_gives_the_tokens_of_one_device(form, long_drafts):
    assert_same_tokens(lambda: tiny_buddy(engine="general", predictor=True), **FORMS[form])


@some_families
@every_kv_policy
def test_each_cache_lies_with_its_block(family, kv_policy):
    make = lambda: tiny_buddy(family, engine="general", kv_policy=kv_policy)  # noqa: E731
    assert_same_tokens(make, **ROWS, budget=[0.5, 0.7, 0.9], prefill_budget=0.8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_buddy(engine="general", predictor=True, context_layer=3, context="key+value"),
        lambda: gated("flexidepth", engine="general"),
        lambda: gated("first", engine="general"),
        lambda: exits_at_once(engine="general"),
    ],
    ids=["context-elsewhere", "adjusts-output", "online", "exits"],
)
def test_what_routes_is_given_what_it_reads(make):
    budget = {"budget": ["auto", 0.7, 4 / 6]} if make().router else {}
    assert_same_tokens(make, **ROWS, **budget)


@pytest.mark.parametrize("batch_route", ["shared", "independent"])
def test_rows_that_join_and_leave_a_server_are_told_the_same(batch_route):
    first, second = prompts(2, most=9)
    asked = [request(first, 3, budget=4), request(second, 6, budget=5), request(first[:5], 3)]
    late = [request(second + first, 2, temperature=0.8, seed=3)]
    buddies = [byte_buddy(engine="general") for _ in range(2)]
    expected = served(buddies[0], asked, late, batch_route=batch_route)
    with PretendDevice():
        made = served(spread(buddies[1]), asked, late, batch_route=batch_route)
    assert made == expected


@every_kv_policy
def test_a_server_measures_its_steps(kv_policy):
    with PretendDevice():
        buddy = spread(byte_buddy("static:2,3,4,1", engine="general", kv_policy=kv_policy))
        assert len(calibrate.measure(buddy, 2, seconds=0.0)[0]) == 7


def test_what_steps_cost_on_one_device_is_not_taken_for_what_they_cost_on_others(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(calibrate, "cache_home", lambda: tmp_path)
    now = itertools.count()
    for place in (lambda buddy: buddy, move, lambda buddy: move(buddy, 1), spread, spread):
        with PretendDevice():
            buddy = place(byte_buddy("static:2,3,4,1", engine="general"))
            calibrate.cost_of(buddy, 2, seconds=20.0, clock=lambda: float(next(now)))
    assert len(list((tmp_path / "costs").iterdir())) == 4


@pytest.mark.parametrize("blocks", [3, 4, 5, 6])
@every_kv_policy
def test_a_step_moves_the_residual_where_the_next_block_that_runs_lies_elsewhere(blocks, kv_policy):
    buddy = tiny_buddy(policy="static:2,3,4,1", kv_policy=kv_policy, engine="general")
    ids, budget = random_ids(2, 5), f"{blocks} blocks"
    with PretendDevice() as device, torch.no_grad():
        cache = spread(buddy)(ids, budget=budget).cache
        before = copy.copy(device.moves)
        out = buddy(ids[:, :1], budget=budget, cache=cache)
    step = device.moves - before
    (runs,) = {tuple(sorted(runs)) for runs in out.plan.executed_sets}
    assert len(runs) == blocks
    moved = sum(n for place, n in step.items() if "executors/blocks.py" in place)
    assert moved == moves_of(runs)
    if kv_policy != "project":  # whose blocks compute keys and values though they are skipped
        angles = len({PLACES[block] for block in runs} - {0})  # the frequencies, for each device
        assert sum(step.values()) == moved + angles


def test_a_pass_that_keeps_no_cache_gives_the_logits_of_one_device():
    buddy, twin = (tiny_buddy(engine="general") for _ in range(2))
    options = {"attention_mask": MASK, "budget": [0.5, 0.7, 1.0], "use_cache": False}
    with torch.no_grad():
        expected = buddy(PROMPTS, **options)
        with PretendDevice():
            made = spread(twin)(PROMPTS, **options)
    assert made.logits.tolist() == expected.logits.tolist()


def test_a_prior_is_measured_where_the_blocks_lie():
    buddy, twin = (tiny_buddy(engine="general") for _ in range(2))
    expected = measure(build_indicator("delta-ppl", buddy.backbone), PROMPTS, batch=2)
    with PretendDevice():
        indicator = build_indicator("delta-ppl", spread(twin).backbone)
        assert measure(indicator, PROMPTS, batch=2).tolist() == expected.tolist()


def test_a_model_is_put_on_one_device_again():
    options = ROWS | {"budget": 0.7}
    buddy, (expected, _) = tiny_buddy(engine="general"), generated(tiny_buddy(), **options)
    with PretendDevice() as device:
        spread(buddy).to("cuda")
        assert not hasattr(buddy, "hf_device_map")
        before = sum(device.moves.values())
        made, _ = generated(buddy, **options)
    assert made.tolist() == expected.tolist()
    assert sum(device.moves.values()) == before


def test_graphs_step_aside_and_a_user_who_insists_is_told(caplog):
    with PretendDevice():
        buddy = spread(tiny_buddy())
        buddy.executor.refresh()
        places = [place.index for place in buddy.hf_device_map.values()]
        assert places == list(PLACES)  # as transformers' tools ask
        assert "the blocks are on several devices" in buddy.executor.why_general
        with pytest.raises(ModelError, match=r'"native" cannot be had: .* on several devices'):
            BuddyForCausalLM(buddy.model, engine="native").executor.fast_path()


@pytest.mark.parametrize("places", [(1, 0, 0, 1, 1, 1)], ids=["first-block-elsewhere"])
def test_what_routes_must_be_with_the_tokens(places):
    with PretendDevice(), pytest.raises(ModelError, match="its embedding, first block"):
        spread(tiny_buddy(), places)
