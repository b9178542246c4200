"""Candidates are scored from a shared cache, under one route that no answer can reach."""

import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.budget.source import ConstantBudget, PhasedBudget
from buddy.depth.policy import Observation
from buddy.depth.select import select_blocks
from buddy.engine.naive import naive_context, naive_hidden
from buddy.errors import DataError
from buddy.lab.evaluation.tasks.scoring import ask, ask_leaking, score
from tests.tiny import FAMILY_NAMES, random_ids, tiny_buddy

BLOCKS = 4
LONG = 64


def tokens(count, *, seed):
    return tuple(random_ids(1, count, seed=seed)[0].tolist())


def naive_score(model, routed, whole, answer, blocks):
    """Scores by the executable specification: no cache, no batch, no pads."""
    backbone, policy = model.backbone, model.policy
    seen = torch.tensor(routed)
    keys, values = naive_context(backbone, seen, policy.context_layer)
    router_sees = torch.ones(1, len(seen), dtype=torch.bool)
    state = policy.observe(None, Observation(seen[None], router_sees, keys, values))
    budget = torch.tensor([blocks])
    mask = select_blocks(policy.scores(state, budget), budget, pinned=policy.pinned).mask
    fed = torch.tensor(whole[:-1])
    hidden = naive_hidden(backbone, fed, mask.expand(len(fed), -1), "project")
    logprobs = backbone.logits(hidden).float().log_softmax(-1)[-len(answer) :]
    target = torch.tensor(answer)
    greedy = bool((logprobs.argmax(-1) == target).all())
    total = float(logprobs.gather(1, target[:, None]).sum())
    return total, greedy, tuple(mask[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize("family", FAMILY_NAMES)
@torch.no_grad()
def test_a_batch_of_questions_equals_each_candidate_computed_alone(family):
    model = tiny_buddy(family)
    questions = []
    shapes = [(9, 1, 1), (4, 3, 1, 6), (12, 2), (5, 4, 4), *[(1, 1)] * 8]
    for seed, (context, *answers) in enumerate(shapes):
        before = tokens(context, seed=seed)
        questions.append([(before, tokens(n, seed=50 + seed + n)) for n in answers])
    asked = [ask(candidates, context=LONG) for candidates in questions]
    assert [len(item) for item in asked] == [1] * len(shapes)
    scored = score(model, model.policy, ConstantBudget(BLOCKS), [item for [item] in asked])
    for candidates, out in zip(questions, scored, strict=True):
        for place, (before, answer) in enumerate(candidates):
            expected, greedy, blocks = naive_score(
                model, before, (*before, *answer), answer, BLOCKS
            )
            # atol: sums over keys and candidates run in another order over a cache.
            assert out.loglikelihoods[place] == pytest.approx(expected, abs=2e-4)
            assert out.greedy[place] == greedy
            assert out.blocks == blocks
    assert len({out.blocks for out in scored}) > 1  # the input decides


@torch.no_grad()
def test_an_answer_finds_in_the_cache_what_the_kv_policy_left_there():
    model = tiny_buddy()
    source = PhasedBudget(BLOCKS, ConstantBudget(BLOCKS + 2))
    asked = ask([(tokens(9, seed=1), tokens(4, seed=2))], context=LONG)

    def loglikelihood(model_with, kv_policy=None):
        [scored] = score(model_with, model_with.policy, source, asked, kv_policy)
        return scored.loglikelihoods[0]

    for name in ("lazy", "zero", "mask"):
        alone = BuddyForCausalLM(model.model, policy=model.policy, kv_policy=name)
        assert loglikelihood(model, name) == loglikelihood(alone)
    assert len({loglikelihood(model, name) for name in ("lazy", "zero", "mask")}) == 3
    assert loglikelihood(model) == loglikelihood(model, "lazy")


@torch.no_grad()
def test_greedy_is_claimed_for_the_greedy_continuation_alone():
    model = tiny_buddy()
    before = tokens(7, seed=3)
    ids = torch.tensor([before])
    out = model.generate(ids, budget=f"{BLOCKS} blocks", reroute="prefill", max_new_tokens=3)
    best = tuple(out[0, 7:].tolist())
    other = (*best[:2], best[2] % 90 + 3)
    [scored] = score(
        model,
        model.policy,
        ConstantBudget(BLOCKS),
        ask([(before, best), (before, other)], context=LONG),
    )
    assert scored.greedy == (True, False)


@torch.no_grad()
def test_the_answer_reaches_the_route_only_where_leaking_is_asked_for():
    model = tiny_buddy()
    before = tokens(3, seed=1)
    answers = [tokens(9, seed=seed) for seed in range(2, 14)]
    candidates = [(before, answer) for answer in answers]
    honest = score(model, model.policy, ConstantBudget(4), ask(candidates, context=LONG))
    assert len(honest) == 1  # one plan for all twelve
    leaking = score(model, model.policy, ConstantBudget(4), ask_leaking(candidates, context=LONG))
    assert len({item.blocks for item in leaking}) > 1
    for (context, answer), candidate in zip(candidates, leaking, strict=True):
        whole = (*context, *answer)
        expected, _, blocks = naive_score(model, whole[:-1], whole, answer, 4)
        assert candidate.blocks == blocks
        assert candidate.loglikelihoods[0] == pytest.approx(expected, abs=2e-4)


def test_where_candidates_stand_in_the_context_the_route_ends_before_them():
    common, answer = (5, 6, 7), (20, 21)
    [question] = ask([((*common, 8), answer), ((*common, 9, 10), answer)], context=LONG)
    assert question.routed == common
    assert question.rests == ((8, 20), (9, 10, 20))


def test_contexts_with_nothing_in_common_are_questions_of_their_own():
    questions = ask([((5, 6), (20,)), ((7,), (21, 22))], context=LONG)
    assert [question.routed for question in questions] == [(5, 6), (7,)]
    assert [question.answers for question in questions] == [((20,),), ((21, 22),)]


@pytest.mark.parametrize("make", [ask, ask_leaking])
@pytest.mark.parametrize("before", [(2,), (2, 3, 4, 5)])
def test_an_answer_that_the_context_cannot_hold_is_refused(make, before):
    fits, too_long = tuple(range(10, 14)), tuple(range(10, 15))
    [question] = make([(before, fits)], context=4)
    assert (*question.routed, *question.rests[0]) == (before[-1], 10, 11, 12)
    with pytest.raises(DataError, match=r"answer 2 of 2 has 5 tokens.*holds 4") as caught:
        make([(before, fits), (before, too_long)], context=4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("context", "routed"), [(8, (2, 3, 4, 5, 6)), (7, (3, 4, 5, 6)), (4, (6,))]
)
def test_candidates_of_unequal_length_lose_the_same_and_stay_one_question(context, routed):
    before, short, long = (2, 3, 4, 5, 6), (7,), (8, 9, 10, 11)
    [question] = ask([(before, short), (before, long)], context=context)
    assert question.routed == routed
    assert question.rests == ((), (8, 9, 10))
    assert question.answers == (short, long)


def test_candidates_in_the_context_lose_the_same_if_they_still_begin_alike():
    first, second = ((2, 3, 4, 20), (30,)), ((2, 3, 4, 21, 22), (30, 31))
    [question] = ask([first, second], context=5)
    assert (question.routed, question.rests) == ((3, 4), ((20,), (21, 22, 30)))
    assert [item.routed for item in ask([first, second], context=3)] == [(3, 4, 20), (21, 22)]


@pytest.mark.parametrize("context", [4, 5, 6, 7, 8])
def test_a_long_context_loses_its_beginning_and_the_last_answer_token_is_not_fed(context):
    [question] = ask([((2, 3, 4, 5, 6), (7, 8, 9))], context=context)
    fed = (*question.routed, *question.rests[0])
    assert fed == (2, 3, 4, 5, 6, 7, 8)[-context:]
