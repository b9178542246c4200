"""Scores of prompts are those of one full forward under the same plan, however they are fed."""

import numpy as np
import pytest
import torch

from buddy.backbone.quantised import quantise_backbone
from buddy.engine.naive import naive_hidden
from buddy.engine.planned_prompt import plan_prompt
from buddy.serving.control.cost import NUM_COEFFICIENTS, CostModel, features
from buddy.serving.control.protocol import NoControl, StepShape
from buddy.serving.request import PromptScores
from buddy.serving.rows.passes import head_blocks
from buddy.serving.rows.row import Submitted
from buddy.serving.rows.scoring import PromptScorer
from tests.budgets import auto, default, fixed
from tests.product.engine.test_steering import ByNorm
from tests.product.serving.made import Bench, Told, byte_buddy, prompts, request
from tests.product.serving.test_batcher import Drawn


def scored(prompt, top=3, max_tokens=2, **more):
    return request(prompt, max_tokens, prompt_logprobs=top, **more)


def scores_of(told):
    """What was told of the prompt: once, before all else."""
    assert [place for place, delta in enumerate(told.deltas) if delta.prompt is not None] == [0]
    return told.deltas[0].prompt


@torch.no_grad()
def check_scores(buddy, asked, told, depth=None):
    """One forward of the whole prompt under its plan, and all of its logits at once."""
    scores, ids = scores_of(told), torch.tensor(asked.prompt)
    depth = asked.budget.prompt if depth is None else depth
    plan = torch.ones(6, dtype=torch.bool)
    if depth < 6:
        plan = torch.from_numpy(plan_prompt(buddy.inference_policy(), ids, depth).block_mask)
    kv_policy = buddy.new_session(1, 1).kv.kv_policy
    hidden = naive_hidden(buddy.backbone, ids, plan.repeat(len(ids), 1), kv_policy)
    logprobs = buddy.backbone.logits(hidden).log_softmax(-1)[:-1]
    own = logprobs.gather(1, ids[1:, None])
    values, tokens = logprobs.topk(asked.prompt_logprobs)
    np.testing.assert_allclose(scores.logprobs, own[:, 0], atol=1e-4, rtol=0)
    np.testing.assert_allclose(scores.top_logprobs, values, atol=1e-4, rtol=0)
    assert scores.ranks.tolist() == ((logprobs > own).sum(-1) + 1).tolist()
    assert scores.top_tokens.tolist() == tokens.tolist()
    in_answer = sum(int(runs.sum()) for runs in told.runs[1:])
    assert told.finished.usage.blocks_executed == depth * len(ids) + in_answer


@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize("chunk", [3, 256])
def test_scores_are_those_of_one_forward_under_the_rows_plan(engine, chunk):
    buddy = byte_buddy("static:2,3,4,1", engine=engine)
    asked = [
        scored(prompt, budget=fixed(prefill=3 + at % 4, decode=6), seed=at % 2 or None)
        for at, prompt in enumerate(prompts(5, 2, 2, 50))
    ]
    others = [request(prompt) for prompt in prompts(3, 5)]
    told = Bench(buddy, chunk=chunk).run(*others, *asked)[3:]
    for wanted, heard in zip(asked, told, strict=True):
        check_scores(buddy, wanted, heard)
        assert len(heard.tokens) == 2, "an answer follows"


@pytest.mark.parametrize("kv_policy", ["zero", "mask", "project"])
def test_scores_are_exact_whatever_skipped_blocks_leave_and_whoever_routes(kv_policy):
    buddy = byte_buddy(kv_policy=kv_policy, predictor=True)
    for asked in (
        scored(prompts(1, 3, 40, 40)[0], budget=4),
        scored(prompts(1, 4, 40, 40)[0], budget=auto(least=1, most=6)),
    ):
        (told,) = Bench(buddy, chunk=9, batch_route="independent").run(asked)
        depth = told.finished.usage.budget_blocks
        assert asked.budget.kind == "auto" or depth == 4
        check_scores(buddy, asked, told, depth)


def test_a_policy_that_decides_while_blocks_run_is_scored_too():
    buddy = byte_buddy(ByNorm(range(2, 5)))
    prompt = prompts(1, 3, 70, 70)[0]
    (told,) = Bench(buddy, chunk=5).run(scored(prompt, budget=6))
    with torch.no_grad():
        logits = buddy(torch.tensor([prompt])).logits[0, :-1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    np.testing.assert_allclose(scores_of(told).logprobs, own, atol=1e-4, rtol=0)


def test_a_scored_prompt_takes_nothing_from_the_cache_and_leaves_it_for_others():
    bench, prompt = Bench(least_shared=2), prompts(1, 3, 40, 40)[0]
    bench.run(request(prompt))
    together = bench.run(scored(prompt), request(prompt), scored(prompt, seed=3))
    assert [told.finished.usage.cached_tokens for told in together] == [0, 39, 0]
    check_scores(bench.buddy, scored(prompt), together[0])
    fresh = Bench(least_shared=2)
    fresh.run(scored(prompt))
    assert fresh.run(request(prompt))[0].finished.usage.cached_tokens == 39


@pytest.mark.parametrize("top", [None, 0, 2])
def test_a_prompt_alone_generates_nothing_and_says_how_deep_it_was_scored(top):
    buddy = byte_buddy("static:2,3,4,1")
    asked = scored(prompts(1, 3, 128, 128)[0], top, max_tokens=0, budget=default(least=2, most=5))
    one = scored([5], top, max_tokens=0)
    told, single = Bench(buddy, chunk=50).run(asked, one)
    assert not told.tokens
    assert not told.text
    assert (told.finished.reason, told.finished.usage.completion_tokens) == ("length", 0)
    assert told.finished.usage.budget_blocks == 5
    assert told.finished.usage.distinct_plans == 1
    assert single.finished.usage.blocks_executed == 4
    if top is not None:
        check_scores(buddy, asked, told, 5)
        assert len(scores_of(single).logprobs) == 0
    else:
        assert not told.deltas


@pytest.mark.parametrize("engine", ["auto", "general"])
def test_scores_of_a_seed_are_bit_equal_in_any_company(engine):
    buddy = byte_buddy("static:2,3,4,1", engine=engine)
    asked = [scored(prompts(1, n, n, n)[0], seed=n, budget=4) for n in (3, 17, 31, 47, 90, 120)]
    others = [request(p, 6, temperature=0.8) for p in prompts(8, 12, 60, 120)]
    alone = [Bench(buddy, slots=128).run(wanted)[0] for wanted in asked]
    mixed = [*others[:4], *asked, *others[4:]]
    company = Bench(buddy, rows=14, slots=128, control=Drawn()).run(*mixed)[4:-4]
    for single, other in zip(alone, company, strict=True):
        for name in PromptScores.__dataclass_fields__:
            one, two = (getattr(scores_of(heard), name) for heard in (single, other))
            assert np.array_equal(one, two), name


def test_never_are_more_logits_held_than_those_of_a_few_tokens(monkeypatch):
    held, take = [], PromptScorer.take
    monkeypatch.setattr(
        PromptScorer, "take", lambda self, logits: held.append(len(logits)) or take(self, logits)
    )
    (told,) = Bench(byte_buddy("full", engine="general")).run(
        scored(prompts(1, 3, 120, 120)[0], budget=6)
    )
    assert len(scores_of(told).logprobs) == sum(held) == 119
    assert max(held) <= 32


def test_what_fails_while_a_prompt_is_scored_fails_its_request_alone():
    buddy = byte_buddy("full", engine="general")
    with torch.no_grad():
        buddy.backbone.embedding.weight[7] = torch.nan
    bench = Bench(buddy)
    asked = request([1, 2, 3], budget=6)
    good, bad = bench.run(asked, scored([1, 7, 3], budget=6, max_tokens=0))
    assert "not finite" in bad.failed
    assert good.tokens == Bench(buddy).run(asked)[0].tokens
    assert not bench.batcher.rows


def test_parts_of_a_scored_prompt_are_shorter_by_what_its_logits_cost():
    buddy, reports = byte_buddy("static:2,3,4,1"), []
    shape = buddy.backbone.shape()
    head = shape.head_params / shape.block_params

    class Reporting(NoControl):
        def report(self, step):
            reports.append(step)

    bench = Bench(buddy, control=Reporting(prompt_tokens=24))
    bench.run(scored(prompts(1, 3, 100, 100)[0], budget=4, max_tokens=0))
    assert {report.prompt_lanes for report in reports[:-1]} == {int(24 / (1 + head / 4))} != {24}
    assert sum(report.scored_blocks for report in reports) == pytest.approx(99 * head, rel=1e-3)
    quantise_backbone(buddy.backbone, "int8")
    assert head_blocks(buddy.backbone) == pytest.approx(head, rel=0.2), "weights are still weights"


def test_who_waits_counts_by_what_its_logits_cost():
    bench = Bench(byte_buddy("static:2,3,4,1"), chunk=2)
    head = bench.batcher.queue(0.0).head_blocks
    assert head > 0
    weight = 1 + head / 4
    bench.add(request([1, 2, 3], budget=4))
    bench.add(scored([1, 2, 3, 4], budget=4))
    coming = [Submitted(9, scored([5, 6], budget=4), Told(), None, 0.0)]
    assert bench.batcher.queue(0.0).prompt_tokens == pytest.approx(3 + 4 * weight)
    assert bench.batcher.queue(0.0, coming).prompt_tokens == pytest.approx(3 + 6 * weight)
    assert bench.batcher.queue(0.0, coming).size == 3
    bench.batcher.step()
    view = bench.batcher.queue(0.0)
    left = {row.number: row.prompt_left for row in bench.batcher.rows}
    assert (view.prompt_tokens, left) == (0, {0: 1, 1: 4})
    assert view.prompt_tokens_running == pytest.approx(1 + weight * left[1])


def test_a_cost_counts_the_logits_of_prompts_as_blocks():
    shape = StepShape().with_prompt(10, 4)
    scored_shape = StepShape(**{**_fields(shape), "scored_blocks": 20.0})
    deeper = StepShape(**{**_fields(shape), "prompt_blocks": 60})
    found, plain, deep = (features(given) for given in (scored_shape, shape, deeper))
    place = NUM_COEFFICIENTS - 2
    assert found[place] == deep[place] == plain[place] + 20
    assert found[:place] + found[place + 1 :] == plain[:place] + plain[place + 1 :]
    model = CostModel(tuple([1e-3] * NUM_COEFFICIENTS), plain=16)
    assert model.predict(scored_shape) > model.predict(shape)


def _fields(shape):
    return {name: getattr(shape, name) for name in StepShape.__dataclass_fields__}
