"""Rows that few blocks draft for are told what they would be told without, and billed the same."""

import json
import random
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from buddy.budget.resolved import ResolvedBudget
from buddy.budget.thinking import ThinkingMarks
from buddy.cli.commands.serve import _check_drafts
from buddy.errors import BudgetError
from buddy.generation import depth_drafts, shallow
from buddy.generation.drafts import read_drafts
from buddy.serving.control.protocol import Orders
from buddy.serving.http.defaults import Defaults
from buddy.serving.request import Grammar
from buddy.serving.rows import passes as row_passes
from buddy.serving.rows.grammar import GrammarMaker
from tests.product.drafting import Clock, always_draft, say_little
from tests.product.serving.made import END, Bench, byte_buddy, byte_tokenizer, prompts, request
from tests.product.serving.serving import served
from tests.product.serving.test_row_drafts import BODIES, Counting, check_same, several


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Draft whatever it costs, and however unlikely it is: times of tests are those of nothing."""
    always_draft(monkeypatch)


def agreeing(policy="static:2,3,4,1", *, share=0.1, **more):
    """A model whose later blocks say little, so that few of them are right now and then."""
    return say_little(byte_buddy(policy, **more), share)


def drafted(asked, drafts="3 blocks"):
    return replace(asked, drafts=read_drafts(drafts))


@pytest.mark.parametrize("drafts", ["3 blocks", "ngram+3 blocks"])
@pytest.mark.parametrize(
    ("policy", "batch_route", "kv_policy", "more"),
    [
        ("table", "independent", "lazy", {}),
        (None, "independent", "mask", {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
        ("static:2,3,4,1", "shared", "zero", {"top_logprobs": 2, "min_tokens": 0}),
        ("static:2,3,4,1", "independent", "project", {"stop": ("a", "e ", "o"), "top_p": 0.8}),
    ],
)
def test_a_drafted_answer_is_the_plain_one(policy, batch_route, kv_policy, more, drafts):
    buddy = agreeing(None if policy == "table" else policy, kv_policy=kv_policy)
    if policy is None:
        buddy._tabulate = lambda policy: policy  # the router reads the cache
    asked = several(8, 5, **more)
    plain = Bench(buddy, batch_route=batch_route, kept_prefixes=0, ends=(7,)).run(*asked)
    counting = Counting()
    bench = Bench(buddy, batch_route=batch_route, kept_prefixes=0, ends=(7,), control=counting)
    told = bench.run(*(drafted(each, drafts) for each in asked))
    check_same(plain, told)
    assert sum(step.drafted for step in counting.reports) > 20
    assert any(0 < step.accepted < step.drafted for step in counting.reports)
    assert all((step.draft_s > 0) == (step.draft_blocks > 0) for step in counting.reports)
    assert sum(step.draft_blocks for step in counting.reports) > 60
    assert not bench.batcher.pool.session.sequences


def test_drafts_end_before_a_mark_at_which_the_depth_changes():
    ids = prompts(6, 4, 4, 6)
    texts = Bench(agreeing()).run(*(request(each, max_tokens=30, budget=6) for each in ids))
    common = Counter(token for told in texts for token in told.tokens).most_common(2)
    marks = ThinkingMarks("A", "B", *(token for token, _ in common))
    budget = ResolvedBudget(kind="fixed", least=6, most=6, prefill=5, think=4, marks=marks)
    asked = [request(each, max_tokens=30, budget=budget) for each in ids]
    plain = Bench(agreeing(), kept_prefixes=0).run(*asked)
    counting = Counting()
    told = Bench(agreeing(), kept_prefixes=0, control=counting).run(*map(drafted, asked))
    check_same(plain, told)
    assert {int(runs.sum()) for answer in told for runs in answer.runs} == {4, 5, 6}
    assert sum(step.accepted for step in counting.reports) > 3


def test_a_grammar_is_followed_through_drafts():
    buddy, tokenizer = agreeing(ends=END), byte_tokenizer()
    maker = GrammarMaker(tokenizer, 264, [END])
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"a": {"enum": ["xyz", "uvw"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    )
    told = []
    for kind in ("none", "5 blocks"):
        asked = request(b"hello hello", max_tokens=40, budget=6, grammar=Grammar(schema=schema))
        bench = Bench(buddy, ends=(END,), control=Counting())
        heard = bench.add(drafted(asked, kind), grammar=maker.compile(asked.grammar))
        while bench.batcher.has_work:
            bench.batcher.step()
        told.append(heard)
    check_same(told[:1], told[1:])
    assert json.loads(told[0].text)["a"] in ("xyz", "uvw")
    assert sum(step.drafted for step in bench.batcher._control.reports) > 0


def test_rows_join_leave_and_cancel_beside_drafts():
    buddy = agreeing()
    asked = several(24, 8)
    plain = [Bench(buddy, kept_prefixes=0).run(wanted)[0] for wanted in asked]
    counting = Counting()
    draw = random.Random(1)
    bench, everyone = Bench(buddy, chunk=9, kept_prefixes=3, control=counting), []
    todo = list(asked)
    while todo or bench.batcher.has_work:
        for _ in range(min(draw.choice([0, 0, 1, 2]), len(todo))):
            wanted = todo.pop(0)
            kind = draw.choice(["none", "3 blocks", "ngram+4 blocks"])
            everyone.append(bench.add(drafted(wanted, kind)))
        if draw.random() < 0.1 and bench.batcher.rows:
            bench.batcher.cancel(draw.choice(bench.batcher.rows).number)
        bench.batcher.step()
    ended = 0
    for told, known in zip(everyone, plain, strict=True):
        assert told.tokens == known.tokens[: len(told.tokens)]
        if told.ended:
            ended += 1
            assert told.finished == known.finished or told.finished.usage.cached_tokens
    assert 10 < ended < 24
    assert sum(step.accepted for step in counting.reports) > 5


def test_what_few_blocks_leave_is_taken_back():
    bench = Bench(agreeing(), control=Counting())
    asked = request(prompts(1, 3, 5, 5)[0], max_tokens=20, budget=6)
    told = bench.add(drafted(asked))
    bench.batcher.step()
    bench.batcher.step()
    row, session = bench.batcher.rows[0], bench.batcher.pool.session
    while bench.batcher.has_work:
        assert session.sequences[row.sequence].length == row.num_fed
        assert row.executed == 6 * row.num_fed
        bench.batcher.step()
    assert len(told.tokens) == 20
    assert max(step.drafted for step in bench.batcher._control.reports) == 8


def test_a_pass_that_fails_while_it_drafts_hurts_nobody(monkeypatch, caplog):
    asked = [request(ids, max_tokens=9, budget=6) for ids in prompts(3, 4, 4, 6)]
    plain = Bench(agreeing(), kept_prefixes=0).run(*asked)
    original, calls = shallow.run_step, []

    def fails(*args, **more):
        calls.append(0)
        if len(calls) % 3 == 0:
            raise RuntimeError("no memory")
        return original(*args, **more)

    monkeypatch.setattr(shallow, "run_step", fails)
    check_same(plain, Bench(agreeing(), kept_prefixes=0).run(*map(drafted, asked)))
    assert len(calls) > 6
    assert "few blocks has failed: no memory" in caplog.text


def test_few_blocks_draft_only_below_what_a_row_runs():
    counting = Counting()
    asked = [request(ids, max_tokens=9, budget=4) for ids in prompts(2, 4, 4, 6)]
    Bench(agreeing(), control=counting).run(
        drafted(asked[0], "4 blocks"), drafted(asked[1], "5 blocks")
    )
    assert not any(step.draft_blocks for step in counting.reports)
    Bench(agreeing(), control=counting).run(*(drafted(each, "3 blocks") for each in asked))
    assert any(step.draft_blocks for step in counting.reports)


@pytest.mark.parametrize(
    ("share", "shallow_s", "least", "most"),
    [
        (0.0, 0.4, 0.4, 0.8),  # right and cheap
        (0.0, 5.0, 1.0, 1.2),  # right and dear: one pass says so
        (1.0, 0.4, 1.0, 1.2),  # wrong and cheap
    ],
)
def test_few_blocks_draft_only_while_it_pays(share, shallow_s, least, most, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(depth_drafts, "DRAFTED_WORDS", 1.0)
    clock = Clock()
    monkeypatch.setattr(shallow, "time", clock)
    monkeypatch.setattr("buddy.serving.rows.batcher.time", clock)
    clock.times(monkeypatch, shallow, shallow_s)
    clock.times(monkeypatch, row_passes, 1.0)
    counting = Counting()
    asked = request(prompts(1, 3, 5, 5)[0], max_tokens=100, budget=6)
    Bench(agreeing(share=share), control=counting).run(drafted(asked))
    assert least <= clock.now / 100 < most
    assert any(step.draft_blocks for step in counting.reports), "it has been tried"


def test_no_row_waits_for_few_blocks_beside_a_promise():
    class Promised(Counting):
        def decide(self, rows, queue):
            return Orders(prompt_tokens=256, allows_draft_passes=False)

    promised = Promised()
    asked = [request(ids, max_tokens=9, budget=6) for ids in prompts(2, 4, 4, 6)]
    Bench(agreeing(), control=promised).run(*map(drafted, asked))
    assert not any(step.draft_blocks for step in promised.reports)


DEFAULTS = ["ngram+12 blocks", "0.4"]


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_request_names_a_budget_that_drafts_or_the_server_does(default):
    with (
        served(defaults=Defaults(drafts=read_drafts(default))) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        for path, body in BODIES.items():
            for asked, expected in ((None, default), (0.5, 0.5), ("ngram+0.3", "ngram+0.3")):
                reply = client.post(f"/v1/{path}", json={**body, "drafts": asked})
                assert reply.status_code == 200, reply.text
                assert running.engine.seen[-1].drafts == read_drafts(expected)
            for budget in ("12 blocks", "mean:0.7"):  # what the server names cannot draft for it
                assert client.post(f"/v1/{path}", json={**body, "budget": budget}).is_success
                assert running.engine.seen[-1].drafts.budget is None
                assert running.engine.seen[-1].drafts.ngrams == ("ngram" in default)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"drafts": 0.5, "budget": 0.5}, "below the answer's 15 of 30 blocks, got 15"),
        ({"drafts": "ngram+1.0"}, "below the answer's 30 of 30 blocks, got 30"),
        ({"drafts": "2 blocks"}, "expected 3 to 30 blocks"),
        ({"drafts": "40 blocks"}, "40"),
        ({"drafts": "ngram+0.5", "budget": "mean:0.7"}, "under a mean"),
        ({"drafts": "ngram+auto"}, 'drafts must be "none", "ngram", a budget'),
        ({"drafts": "half+0.5"}, 'drafts must be "none", "ngram", a budget'),
    ],
)
def test_a_budget_that_cannot_draft_is_refused_by_name(more, why):
    with served() as running, httpx.Client(base_url=running.url, timeout=10) as client:
        for path, body in BODIES.items():
            reply = client.post(f"/v1/{path}", json={**body, **more})
            assert reply.status_code == 400, reply.text
            assert reply.json()["error"]["param"] == "drafts"
            assert why in reply.json()["error"]["message"]


@pytest.mark.parametrize("drafts", ["6 blocks", "ngram+1.0", "ngram+9 blocks"])
def test_a_server_refuses_a_budget_that_drafts_for_nobody(drafts):
    policy = agreeing().policy
    with pytest.raises(BudgetError, match=r"--drafts: .*6"):
        _check_drafts(read_drafts(drafts), policy)
    _check_drafts(read_drafts("ngram+3 blocks"), policy)
