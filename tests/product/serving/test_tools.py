"""Tools over HTTP with the official client: a random model's calls are valid, told and streamed."""

import json

import httpx
import openai
import pytest
from tokenizers import AddedToken

from buddy.serving.rows.engine import ServingThread
from tests.product.serving.made import byte_buddy, byte_tokenizer
from tests.product.serving.serving import served

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments['a'] }}{% endfor %}"
    "{{ m.tool_call_id or '' }};{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
LLAMA = TEMPLATE.replace("<tool_call>", '{"name": 1, "parameters": 2}')
MISTRAL = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
SIZE = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
KIND = {**SIZE, "properties": {"a": {"enum": ["x", "é"]}}}


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("size", SIZE), tool("kind", KIND)]
ASKED = [{"role": "user", "content": "h"}]


def tokenizer_of(template, *marks, special=False):
    """Bytes and marks that are one token each."""
    tokenizer = byte_tokenizer()
    added = [AddedToken(mark, special=special, normalized=False) for mark in marks]
    tokenizer.add_tokens(added, special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


def serving(tokenizer):
    """A server over a random model; its prompts may be long, so its context is."""
    return served(
        ServingThread(byte_buddy("static:2,3,4,1", context=2048), tokenizer, "tiny"),
        tokenizer=tokenizer,
    )


KINDS = {
    "plain": (TEMPLATE, ("<tool_call>", "</tool_call>"), False),
    "special": (TEMPLATE, ("<tool_call>", "</tool_call>"), True),
    "llama": (LLAMA, ("<|python_tag|>",), True),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",), True),
}


@pytest.fixture(scope="module", params=KINDS)
def client(request):
    template, marks, special = KINDS[request.param]
    with (
        serving(tokenizer_of(template, *marks, special=special)) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def check(call, names=("size", "kind")):
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["a"]
    is_size = call.function.name == "size"
    assert arguments["a"] in (range(100) if is_size else ("x", "é"))


def ask(client, **more):
    options = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "max_tokens": 200}
    return client.chat.completions.create(**options | more)


def test_a_required_call_is_valid_whatever_the_model(client):
    found = set()
    for seed in range(4):
        (choice,) = ask(
            client, tool_choice="required", seed=seed, parallel_tool_calls=False
        ).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check(call)
        assert len(call.id) == 9
        found.add((call.function.name, call.function.arguments))
    assert len(found) > 1


def test_a_named_tool_is_called_once(client):
    choice = {"type": "function", "function": {"name": "kind"}}
    (call,) = ask(client, tool_choice=choice, seed=1).choices[0].message.tool_calls
    check(call, names=["kind"])


def test_a_stream_has_the_same_calls_each_whole_with_its_place(client):
    options = {"tool_choice": "required", "seed": 3, "temperature": 1.5}
    whole = ask(client, **options).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert [part.index for part in parts] == list(range(len(parts)))
    assert [(part.function.name, part.function.arguments) for part in parts] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert chunks[0].delta.role == "assistant"
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == whole.finish_reason == "tool_calls"


def test_of_itself_it_says_or_calls_and_either_is_whole(client):
    called = 0
    for seed in range(3):
        choice = ask(client, seed=seed, max_tokens=20).choices[0]
        for call in choice.message.tool_calls or []:
            check(call)
            called += 1
        assert choice.message.tool_calls or choice.message.content
        assert choice.finish_reason in ("length", "stop", "tool_calls")
    assert called < 3


@pytest.fixture(scope="module")
def running():
    with serving(tokenizer_of(TEMPLATE, "<tool_call>", "</tool_call>", special=True)) as running:
        yield running


@pytest.fixture
def http(running):
    with httpx.Client(base_url=running.url, timeout=20) as client:
        yield client


def post(http, **body):
    return http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 1, **body})


def test_a_bias_for_the_mark_makes_it_call(http):
    begins = post(http, tools=TOOLS, max_tokens=200, logit_bias={"260": 100}, seed=1).json()
    (call,) = begins["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ("size", "kind")
    assert begins["choices"][0]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_and_their_answers_is_written_by_the_template(http):
    call = {"id": "abc", "type": "function", "function": {"name": "size", "arguments": '{"a": 7}'}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "ok"}]},
    ]
    asked = {"messages": messages, "return_token_strs": False}
    made = http.post("/tokenize", json=asked).json()
    text = http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"]
    assert text == "uh;a7;tokabc;A"
    assert made["count"] == len(made["tokens"]) == len(text)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "no tool 'f'",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "two tools are called 'size'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "should be 'function'"),
        (
            {"tools": [tool("f", {"type": "no"})], "tool_choice": "required"},
            "tools",
            "cannot be followed",
        ),
        ({"tools": [tool("f", {"type": "no"}, strict=True)]}, "tools", "cannot be followed"),
        (
            {"messages": [{"role": "user", "content": "h", "tool_calls": [{}]}]},
            "messages.0.tool_calls.0.function",
            "required",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "no"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "expected a JSON object",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"tools": TOOLS, "min_tokens": 1}, "min_tokens", "ends where it is whole"),
    ],
)
def test_what_cannot_be_called_is_refused_by_its_field(http, change, param, said):
    refused = post(http, **change)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_a_schema_that_no_grammar_follows_is_left_to_the_model_unless_it_must_call(http):
    assert post(http, tools=[tool("f", {"type": "no"})]).status_code == 200


def test_a_template_without_tools_takes_none_but_for_show():
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serving(tokenizer) as running, httpx.Client(base_url=running.url) as http:
        refused = post(http, tools=TOOLS).json()["error"]
        assert refused["param"] == "tools"
        assert "teaches it no calls" in refused["message"]
        assert post(http, tools=TOOLS, tool_choice="none").status_code == 200
        called = {"function": {"name": "f", "arguments": "{}"}}
        messages = [*ASKED, {"role": "assistant", "tool_calls": [called]}]
        assert post(http, messages=messages).json()["error"]["param"] == "messages.1.tool_calls"
