"""Rows that are drafted for are told what they would be told without, and run the same blocks."""

import json
import random
from dataclasses import replace

import httpx
import numpy as np
import pytest

from buddy.cli.commands.serve import _check_drafts
from buddy.depth.policy import OnlinePolicy
from buddy.engine.tokenwise import why_no_drafts
from buddy.errors import PolicyError
from buddy.generation import drafter
from buddy.generation.drafts import read_drafts
from buddy.generation.ngrams import NgramIndex
from buddy.serving.control.protocol import NoControl
from buddy.serving.http.defaults import Defaults
from buddy.serving.request import Grammar
from buddy.serving.rows.grammar import GrammarMaker
from tests.budgets import fixed
from tests.product.serving.made import END, Bench, byte_buddy, byte_tokenizer, prompts, request
from tests.product.serving.serving import served
from tests.product.serving.test_phases import random_phases

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "w10"}], "max_tokens": 2},
    "completions": {"prompt": "w10", "max_tokens": 2},
    "responses": {"input": "w10", "max_output_tokens": 2},
}


class Counting(NoControl):
    """Remembers the reports."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "reports", [])

    def report(self, step):
        self.reports.append(step)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Draft whatever it costs: a tiny random model is rarely right."""
    monkeypatch.setattr(drafter, "draft_length", lambda chance, cost, rows, most: max(0, most))


@pytest.fixture
def knowing(monkeypatch):
    """Answers by prompt: drafts are right up to a point, as they would be where a text is copied.

    What is proposed is no n-gram then; what verifies it is real.
    """
    known = {}

    def propose(self, most):
        prompt = next((ids for ids in known if self._tokens[: len(ids)] == [*ids]), None)
        if prompt is None:
            return []
        place = len(self) - len(prompt)
        right = known[prompt][place : place + most]
        if right and place % 3 == 2:
            right[-1] = (right[-1] + 1) % 256  # and wrong at its end
        return right

    monkeypatch.setattr(NgramIndex, "propose", propose)
    monkeypatch.setattr(NgramIndex, "match", 4)
    return known


def check_same(plain, drafted):
    """All that clients hear, but for the time and for who was beside."""
    for mine, known in zip(drafted, plain, strict=True):
        assert [event.__class__ for event in mine.events] == [
            event.__class__ for event in known.events
        ]
        assert mine.tokens == known.tokens
        assert mine.text == known.text
        assert np.array_equal(mine.runs, known.runs)
        assert mine.finished == known.finished
        assert [delta.logprobs for delta in mine.deltas] == [
            delta.logprobs for delta in known.deltas
        ]


def several(count, seed, **more):
    draw = random.Random(seed)
    return [
        request(
            prompt * 3,
            max_tokens=draw.randint(1, 20),
            budget=fixed(prefill=draw.randint(3, 6), decode=draw.randint(3, 6)),
            **(more | draw.choice([{}, {"seed": 3, "temperature": 0.9}])),
        )
        for prompt in prompts(count, seed, 2, 7)
    ]


@pytest.mark.parametrize(
    ("policy", "batch_route", "kv_policy", "more"),
    [
        ("table", "independent", "lazy", {}),
        (None, "independent", "mask", {"repetition_penalty": 1.3, "frequency_penalty": 0.4}),
        ("static:2,3,4,1", "shared", "zero", {"top_logprobs": 2, "min_tokens": 0}),
        ("static:2,3,4,1", "independent", "project", {"stop": ("a", "e ", "o"), "top_p": 0.8}),
    ],
)
def test_a_drafted_answer_is_the_plain_one(policy, batch_route, kv_policy, more, knowing):
    buddy = byte_buddy(None if policy == "table" else policy, kv_policy=kv_policy)
    if policy is None:
        buddy._tabulate = lambda policy: policy  # the router reads the cache
    asked = several(10, 5, **more)
    plain = Bench(buddy, batch_route=batch_route, kept_prefixes=0, ends=(7,)).run(*asked)
    for wanted, told in zip(asked, plain, strict=True):
        knowing[wanted.prompt] = told.tokens
    counting = Counting()
    bench = Bench(buddy, batch_route=batch_route, kept_prefixes=0, ends=(7,), control=counting)
    drafted = bench.run(*(replaced(wanted) for wanted in asked))
    check_same(plain, drafted)
    assert sum(step.drafted for step in counting.reports) > 20
    assert sum(step.accepted for step in counting.reports) > 10
    assert any(0 < step.accepted < step.drafted for step in counting.reports)
    heard = sum(len(s.gaps_s) + len(s.firsts_s) + s.accepted for s in counting.reports)
    assert heard >= sum(len(told.tokens) for told in plain)
    assert not bench.batcher.pool.session.sequences


def test_drafts_end_before_a_mark_at_which_the_depth_changes(knowing):
    draw = random.Random(11)
    asked = [each for _, each in (random_phases(draw, max_tokens=12) for _ in range(6))]
    plain = Bench(kept_prefixes=0).run(*asked)
    for wanted, told in zip(asked, plain, strict=True):
        knowing[wanted.prompt] = told.tokens
    counting = Counting()
    drafted = Bench(kept_prefixes=0, control=counting).run(*map(replaced, asked))
    check_same(plain, drafted)
    assert sum(step.accepted for step in counting.reports) > 3


def replaced(asked):
    return replace(asked, drafts=read_drafts("ngram"))


def test_ngrams_of_the_text_are_drafted():
    buddy = byte_buddy("static:2,3,4,1")
    counting = Counting()
    (asked,) = several(1, 2)
    asked = replaced(request(asked.prompt, max_tokens=60))
    (told,) = Bench(buddy, control=counting).run(asked)
    (plain,) = Bench(buddy).run(request(asked.prompt, max_tokens=60))
    check_same([plain], [told])
    assert sum(step.accepted for step in counting.reports) > 5, "it repeats itself"
    assert counting.reports[-1].rows <= 9


def test_a_grammar_is_followed_through_drafts(knowing):
    buddy, tokenizer = byte_buddy("static:2,3,4,1", ends=END), byte_tokenizer()
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
    for kind in ("none", "ngram"):
        asked = request(
            b"hello hello", max_tokens=40, drafts=read_drafts(kind), grammar=Grammar(schema=schema)
        )
        bench = Bench(buddy, ends=(END,), control=Counting())
        heard = bench.add(asked, grammar=maker.compile(asked.grammar))
        while bench.batcher.has_work:
            bench.batcher.step()
        told.append(heard)
        knowing[asked.prompt] = heard.tokens
    check_same(told[:1], told[1:])
    assert json.loads(told[0].text)["a"] in ("xyz", "uvw")
    assert sum(step.accepted for step in bench.batcher._control.reports) > 0


def test_rows_join_leave_and_cancel_beside_drafts(knowing):
    buddy = byte_buddy("static:2,3,4,1")
    asked = several(30, 8)
    plain = [Bench(buddy, kept_prefixes=0).run(wanted)[0] for wanted in asked]
    for wanted, told in zip(asked, plain, strict=True):
        knowing[wanted.prompt] = told.tokens
    draw, bench, everyone = random.Random(1), Bench(buddy, chunk=9, kept_prefixes=3), []
    todo = list(asked)
    while todo or bench.batcher.has_work:
        for _ in range(min(draw.choice([0, 1, 2]), len(todo))):
            wanted = todo.pop(0)
            kind = draw.choice([wanted, replaced(wanted)])
            everyone.append((bench.number, bench.add(kind)))
        if draw.random() < 0.1 and bench.batcher.rows:
            bench.batcher.cancel(draw.choice(bench.batcher.rows).number)
        bench.batcher.step()
    ended = 0
    for (_, told), known in zip(everyone, plain, strict=True):
        assert told.tokens == known.tokens[: len(told.tokens)]
        ended += told.ended
    assert 15 < ended < 30


def test_a_seed_is_not_drafted_for_where_its_numbers_depend_on_company(knowing):
    buddy = byte_buddy("static:2,3,4,1", engine="general")
    asked = request(prompts(1, 3, 5, 5)[0], seed=4, temperature=0.8, drafts=read_drafts("ngram"))
    counting = Counting()
    knowing[asked.prompt] = [1] * 20
    Bench(buddy, control=counting).run(asked)
    assert sum(step.drafted for step in counting.reports) == 0
    Bench(buddy, control=counting).run(request(asked.prompt, drafts=read_drafts("ngram")))
    assert sum(step.drafted for step in counting.reports) > 0


@pytest.mark.parametrize("default", ["none", "ngram"])
def test_a_request_says_what_it_is_drafted_from_or_the_server_does(default):
    with (
        served(defaults=Defaults(drafts=read_drafts(default))) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        for asked, expected in ((None, default), ("ngram", "ngram"), ("none", "none")):
            for path, body in BODIES.items():
                reply = client.post(f"/v1/{path}", json={**body, "drafts": asked})
                assert reply.status_code == 200, reply.text
                assert running.engine.seen[-1].drafts == read_drafts(expected)


def test_what_cannot_be_drafted_for_is_refused_by_name():
    class Online(OnlinePolicy):
        name, governed = "online", (2,)
        begin = keep = describe = None

    Online.__abstractmethods__ = frozenset()
    reason = why_no_drafts(Online(6))
    with served() as running, httpx.Client(base_url=running.url, timeout=10) as client:
        running.engine.facts = replace(running.engine.facts, why_no_drafts=reason)
        for path, body in BODIES.items():
            reply = client.post(f"/v1/{path}", json={**body, "drafts": "ngram"})
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "drafts"
            assert "decides while blocks run" in reply.json()["error"]["message"]
            assert client.post(f"/v1/{path}", json=body).status_code == 200
    with pytest.raises(PolicyError, match="--drafts: policy 'online' decides"):
        _check_drafts(read_drafts("ngram"), Online(6))
    _check_drafts(read_drafts("none"), Online(6))
    _check_drafts(read_drafts("ngram"), byte_buddy("static:2,3,4,1").policy)
