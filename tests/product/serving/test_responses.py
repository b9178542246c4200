"""The Responses API with the official client: text, calls, thinking, streams, refusals."""

import json

import httpx
import openai
import pytest

from buddy.budget.thinking import ThinkingMarks
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.replies import ChatShape, Extras
from buddy.serving.http.response_reply import ResponseReply
from buddy.serving.http.responses import ResponsesBody
from buddy.serving.http.speech import Speech
from buddy.serving.http.thinking import ThinkingReader
from buddy.serving.request import Delta, Finished, Grammar
from tests.budgets import fixed
from tests.product.serving.serving import chat_tokenizer, served
from tests.product.serving.test_openai import words
from tests.product.serving.test_replies import usage
from tests.product.serving.test_tools import SIZE, TEMPLATE, serving, tokenizer_of


@pytest.fixture(scope="module")
def running():
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    with served(tokenizer=tokenizer) as running:
        yield running


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, **more):
    return client.responses.create(
        **{"model": "tiny", "input": "w10", "max_output_tokens": 3} | more
    )


def test_a_text_is_answered_whole(client, running):
    made = ask(
        client,
        instructions="w9",
        temperature=0.5,
        text={"format": {"type": "json_schema", "name": "x", "schema": SIZE}},
        extra_body={"budget": 0.6},
    )
    request = running.engine.seen[-1]
    assert request.prompt[:2] == (9, 10)
    assert request.budget == fixed(prefill=18, decode=18)
    assert request.sampling.temperature == 0.5
    assert request.grammar == Grammar(schema=json.dumps(SIZE))
    assert made.output_text == words(request, 3)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (made.object, made.store, made.instructions) == ("response", False, "w9")
    assert made.usage.output_tokens == 3
    assert made.usage.buddy["budget_blocks"] == 18
    assert made.text.format.schema_ == SIZE


def events_of(client, **more):
    return list(ask(client, stream=True, **more))


@pytest.mark.parametrize("thinks", [False, True])
def test_a_stream_tells_of_each_item_as_it_comes_and_ends_with_the_whole(client, running, thinks):
    extra = {"chat_template_kwargs": {"enable_thinking": thinks}, "seed": 1}
    events = events_of(client, extra_body=extra)
    kind = "reasoning_text" if thinks else "output_text"
    names = [event.type for event in events]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *[f"response.{kind}.delta"] * 3,
        f"response.{kind}.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = words(running.engine.seen[-1], 3)
    assert "".join(event.delta for event in events if event.type.endswith("delta")) == said
    last = events[-1].response
    (item,) = last.output
    assert item.content[0].text == said
    assert item.type == ("reasoning" if thinks else "message")
    assert last.usage.output_tokens_details.reasoning_tokens == (3 if thinks else 0)
    whole = ask(client, extra_body=extra)
    assert whole.output[0].content[0].text == said
    assert whole.usage == last.usage


def test_a_conversation_of_items_is_the_chat_it_stands_for():
    body = ResponsesBody.model_validate(
        {
            "instructions": "be",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "one"},
                {"type": "function_call_output", "call_id": "2", "output": "two"},
                {"type": "message", "id": "msg", "role": "assistant",
                 "content": [{"type": "output_text", "text": "b", "annotations": []}]},
                {"role": "user", "content": "c"},
            ],
        }
    )  # fmt: skip
    messages = body.chat().messages
    assert [message.role for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "user"),
    ]
    assert messages[2].reasoning_content == "hm"
    assert [call.function.name for call in messages[2].tool_calls] == ["f", "g"]
    assert [message.tool_call_id for message in messages[3:5]] == ["1", "2"]
    assert [message.text for message in messages] == ["be", "a", "", "one", "two", "b", "c"]


def test_calls_are_items_and_go_back_as_they_came():
    tool = {"type": "function", "name": "size", "parameters": SIZE}
    with (
        serving(tokenizer_of(TEMPLATE, "<tool_call>", "</tool_call>")) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"tools": [tool], "tool_choice": {"type": "function", "name": "size"}}
        options |= {"max_output_tokens": 200, "extra_body": {"seed": 1}, "input": "h"}
        made = ask(client, **options)
        (item,) = made.output
        assert (made.status, item.type, item.name) == ("completed", "function_call", "size")
        assert json.loads(item.arguments)["a"] in range(100)
        names = [event.type for event in events_of(client, **options)]
        assert names[2:] == [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
        given = {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
        again = client.responses.with_raw_response.create(
            model="tiny", **options | {"input": [item.to_dict(), given]}
        )
        assert again.parse().output[0].type == "function_call"
        assert "x-buddy-ignored" not in again.headers


@pytest.mark.parametrize("thinks", [False, True])
def test_items_of_an_answer_go_back_whole_and_nothing_of_them_is_ignored(client, running, thinks):
    extra = {"chat_template_kwargs": {"enable_thinking": thinks}}
    made = ask(client, extra_body=extra)
    given = [*(item.to_dict() for item in made.output), {"role": "user", "content": "w9"}]
    assert {"id", "status", "content"} <= given[0].keys()
    body = {"input": given, "max_output_tokens": 1, "include": ["reasoning.encrypted_content"]}
    reply = httpx.post(f"{running.url}/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    assert "x-buddy-ignored" not in reply.headers


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": "w13 w13"}, "input"),
        ({"input": "w9 " * 300}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": 0}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"seed": 2**70}, "seed"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"input": [{"role": "user", "content": "w9"}] * 4096, "instructions": "w9"}, "input"),
        ({"tools": [{"type": "function", "name": "f"}] * 257}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input.0.encrypted_content",
        ),
        ({"budget": 7.5}, "budget"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_that_it_has_here(running, change, param):
    body = {"input": "w10", "max_output_tokens": 2, **change}
    refused = httpx.post(f"{running.url}/v1/responses", json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [None, False, True])
def test_events_are_made_for_a_stream_alone(stream):
    reply = ResponseReply(
        ResponsesBody(input="w10", stream=stream),
        shape=ChatShape(),
        model="tiny",
        num_blocks=30,
        num_answers=1,
        per_prompt=1,
        extras=Extras(),
        reader=PromptReader(chat_tokenizer()),
        speeches=[Speech(ThinkingReader(ThinkingMarks("<think>", "</think>", 1, 2), is_open=True))],
    )
    said = [reply.chunk(0, Delta(text=text, tokens=(3,))) for text in ("Hm.", "</think>w4", " w5")]
    said.append(reply.end(0, Finished(reason="stop", usage=usage(0))))
    assert [bool(part) for part in said] == [bool(stream)] * 4
    thought, text = json.loads(reply.whole())["output"]
    assert thought["content"][0]["text"] == "Hm."
    assert (text["content"][0]["text"], text["status"]) == ("w4 w5", "completed")
