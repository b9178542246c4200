"""A grammar after thinking that its limit ends: the text after the mark is of the grammar."""

import json

import httpx
import pytest

from buddy.budget.resolved import ResolvedBudget
from buddy.budget.thinking import ThinkingLimit, ThinkingMarks
from buddy.serving.request import Grammar, Thought
from tests.product.serving.made import END, Bench, byte_tokenizer, request
from tests.product.serving.test_tools import ASKED, KIND, SIZE, TEMPLATE, serving, tool
from tests.product.serving.test_tools import tokenizer_of as tools_tokenizer

pytest.importorskip("llguidance")

OPEN, CLOSE = (byte_tokenizer()(letter).input_ids[0] for letter in "<>")
MARKS = ThinkingMarks("<", ">", OPEN, CLOSE)


@pytest.fixture
def answer(maker, buddy):
    """Answers to prompts, under a schema after thinking of so many tokens."""

    def run(schema, limit, *, is_open=True, count=3, **sampling):
        grammar = Grammar(schema=json.dumps(schema), after=Thought(OPEN, CLOSE, is_open))
        bench = Bench(buddy, ends=(END,))
        told = [
            bench.add(
                request(
                    [seed, OPEN] if is_open else [seed],
                    100,
                    temperature=1.5,
                    seed=seed,
                    thinking=ThinkingLimit(MARKS, limit),
                    **sampling,
                ),
                grammar=maker.compile(grammar),
            )
            for seed in range(count)
        ]
        while bench.batcher.has_work:
            bench.batcher.step()
        return told

    return run


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize("is_open", [True, False])
def test_the_forced_mark_begins_the_grammar(answer, limit, is_open):
    bias = {} if is_open else {"logit_bias": {OPEN: 99.0}}
    for told in answer(SIZE, limit, is_open=is_open, **bias):
        assert told.finished.reason == "stop"
        begins = 0 if is_open else 1
        assert told.tokens.index(CLOSE) - begins <= limit
        assert set(json.loads(told.text.partition(">")[2])) == {"a"}


@pytest.mark.parametrize("value", ["a<b", "<<<<", "a<b>c<d"])
def test_a_mark_in_the_text_of_a_grammar_opens_no_thinking(answer, value):
    budget = ResolvedBudget(kind="fixed", least=5, most=5, prefill=6, think=3, marks=MARKS)
    for told in answer({"const": value}, 1, budget=budget):
        assert told.finished.reason == "stop"
        assert json.loads(told.text.partition(">")[2]) == value
        closes = told.tokens.index(CLOSE)
        ran = [int(runs.sum()) for runs in told.runs]
        assert ran == [6, *[3] * closes, *[5] * (len(ran) - 1 - closes)]


@pytest.fixture(scope="module")
def running():
    marks = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    template = TEMPLATE + "{# </think> #}"
    with serving(tools_tokenizer(template, *marks)) as running:
        yield running


def post(running, path, body):
    given = {"temperature": 1.5, "max_tokens": 200, "thinking_tokens": 4, **body}
    reply = httpx.post(f"{running.url}/v1/{path}", json=given, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def test_a_required_call_follows_the_mark(running):
    tools = [tool("size", SIZE), tool("kind", KIND)]
    body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "seed": 0}
    body["parallel_tool_calls"] = False
    choice = post(running, "chat/completions", body | THINKING)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert list(json.loads(call["function"]["arguments"])) == ["a"]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_schema_follows_the_mark(running, path):
    schema = {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}}
    asked = {"messages": ASKED, **THINKING} if path[:4] == "chat" else {"prompt": "h<think>"}
    choice = post(running, path, {**asked, "response_format": schema, "seed": 1})
    assert choice["finish_reason"] == "stop"
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert list(json.loads(text.rpartition("</think>")[2])) == ["a"]
