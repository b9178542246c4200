"""Several tokens of an answer in one pass are what as many decode steps make of them."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from buddy.budget.source import ConstantBudget
from buddy.depth.policy import OnlinePolicy
from buddy.engine.feed import Feed
from buddy.engine.run import run_step
from buddy.engine.step import Step, logits_of
from buddy.engine.tokenwise import TokenwiseSteering, keep_tokens
from buddy.errors import PolicyError
from tests.tiny import every_kv_policy, random_ids, tiny_buddy

PROMPTS, ANSWER = (5, 8, 3), 6


class Rising:
    """A budget source that looks at what the answer has run: each token more than the last."""

    def ask(self, progress):
        if progress.is_prompt:
            return 4
        assert progress.new_tokens == 1
        assert progress.executed == 4 * PROMPTS[1] + progress.answer_executed
        return 3 + progress.answer_tokens % 4


RISING = Rising()


def begin(buddy, reroute):
    session = buddy.new_session(3, 32)
    sources = ConstantBudget(4), RISING, ConstantBudget(6)
    at = [session.join(source, reroute=reroute) for source in sources]
    ids = torch.cat([random_ids(1, count, seed=count)[0] for count in PROMPTS])
    feed(buddy, session, at, ids, PROMPTS)
    return session, at


def feed(buddy, session, at, ids, counts, **how):
    step = Step(sequence_ids=at, feed=Feed(token_ids=ids, counts=tuple(counts)), **how)
    policy, executor = buddy.inference_policy(), buddy.executor.fast_path()
    with torch.no_grad():
        out = run_step(buddy.backbone, policy, session, step, executor=executor)
        return out, logits_of(buddy.backbone, out, executor)


def tokenwise(buddy, session, at, ids, counts, batch_route="independent"):
    steering = TokenwiseSteering(buddy.inference_policy(), session.find(at), batch_route)
    return (*feed(buddy, session, at, ids, counts, steering=steering), steering)


def facts(sequence):
    route = sequence.route.state.select_rows(torch.tensor([sequence.route.row]))
    numbers = [getattr(route, name).tolist() for name in route.__slots__]
    return replace(sequence, route=None, block_mask=None), sequence.block_mask.tolist(), numbers


@every_kv_policy
@pytest.mark.parametrize("engine", ["auto", "general"])
@pytest.mark.parametrize(
    ("reroute", "batch_route", "planner"),
    [
        ("step", "independent", {}),
        ("step", "shared", {"context": "key", "summary": "ema"}),
        ("prefill", "shared", {}),
        (2, "independent", {"summary": "ema"}),
    ],
)
def test_tokens_of_one_pass_are_those_of_steps(kv_policy, engine, reroute, batch_route, planner):
    buddy = tiny_buddy(kv_policy=kv_policy, engine=engine, **planner)
    answers = torch.stack([random_ids(1, ANSWER, seed=20 + row)[0] for row in range(3)])
    slow, at = begin(buddy, reroute)
    plans, logits = [], []
    for number in range(ANSWER):
        out, made = feed(buddy, slow, at, answers[:, number], (1,) * 3, batch_route=batch_route)
        plans.append(out.plan.host)
        logits.append(made)
    assert len({plan.tobytes() for plan in plans}) > 1
    fast, at = begin(buddy, reroute)
    # Ragged: of what is fed some tokens are taken back, and fed again.
    first = 0
    for counts, kept in (((4, 4, 4), (2, 2, 2)), ((1, 1, 1), (1, 1, 1)), ((3, 3, 3), (3, 3, 3))):
        ids = torch.cat([answers[row, first : first + counts[row]] for row in range(3)])
        out, made, steering = tokenwise(buddy, fast, at, ids, counts, batch_route)
        for row in range(3):
            for number in range(kept[row]):
                lane = out.lanes.first[row] + number
                assert (out.plan.host[lane] == plans[first + number][row]).all()
                # atol: the general path sums in another order; compiled code in the same.
                off = 0 if engine == "auto" else 1e-4
                assert_close(made[lane], logits[first + number][row], atol=off, rtol=off)
        after = {at[row]: steering.after(row, kept[row]) for row in range(3)}
        keep_tokens(fast, after)
        first += kept[0]
    for mine, known in zip(fast.find(at), slow.find(at), strict=True):
        told = 3 if engine == "auto" else 2  # the general path sums in another order
        assert facts(mine)[:told] == facts(known)[:told]


def test_sequences_have_as_many_new_tokens_as_they_like():
    buddy = tiny_buddy()
    session, at = begin(buddy, "step")
    ids, counts = random_ids(1, 8, seed=3)[0], (1, 5, 2)
    out, made, _ = tokenwise(buddy, session, at, ids, counts)
    alone, at = begin(buddy, "step")
    for place, tokens in enumerate(ids.split(counts)):
        for number, token in enumerate(tokens):
            step, logits = feed(buddy, alone, at[place : place + 1], token[None], (1,))
            lane = out.lanes.first[place] + number
            assert (step.plan.host[0] == out.plan.host[lane]).all()
            assert torch.equal(logits[0], made[lane])


def test_a_sequence_of_which_nothing_is_kept_is_as_it_was():
    buddy = tiny_buddy()
    session, at = begin(buddy, "step")
    before = session.state
    _, _, steering = tokenwise(buddy, session, at, random_ids(1, 6)[0], (2, 2, 2))
    assert session.state.sequences != before.sequences
    keep_tokens(session, {number: steering.after(row, 0) for row, number in enumerate(at)})
    assert session.state == before


class Online(OnlinePolicy):
    """Decides while blocks run."""

    name, governed = "online", (2,)

    def begin(self, new):
        return None

    def keep(self, state, block, hidden):
        return hidden[:, 0] > 0

    def describe(self):
        return "online"


def test_a_policy_that_decides_while_blocks_run_is_refused():
    with pytest.raises(PolicyError, match=r"'online' decides while blocks run.*leave drafts out"):
        TokenwiseSteering(Online(6), [])
