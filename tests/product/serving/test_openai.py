"""The official client, unmodified, gets what the engine made: chat, completions, streams, usage."""

import httpx
import openai
import pytest

from buddy.data.examples import encode_chat
from buddy.serving.http.bodies import Message
from buddy.serving.http.prompts import Conversation, PromptReader
from buddy.serving.http.refusals import Refusal
from buddy.serving.request import Grammar
from tests.budgets import default, fixed
from tests.product.serving.scripted import token_at
from tests.product.serving.serving import chat_tokenizer, served
from tests.product.serving.test_row_drafts import BODIES

ASKED = [{"role": "user", "content": "w10 w11"}]


@pytest.fixture(scope="module")
def running():
    with served() as running:
        yield running


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def words(request, count):
    """What the scripted engine says."""
    return "".join(f"w{token_at(request, step)} " for step in range(count))


def test_a_chat_has_the_engines_text_and_usage(client, running):
    made = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=4, temperature=0, extra_body={"budget": 0.6}
    )
    request = running.engine.seen[-1]
    assert request.prompt == (10, 11, 5)
    assert request.budget == fixed(prefill=18, decode=18)
    assert request.sampling.temperature == 0
    assert made.object == "chat.completion"
    assert made.choices[0].message.content == words(request, 4)
    assert made.choices[0].finish_reason == "length"
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
    assert usage.buddy == {
        "budget_blocks": 18,
        "blocks_executed": 18 * 6,
        "blocks_per_token": 18.0,
        "num_blocks": 30,
        "distinct_plans": 4,
        "source": "fixed",
        "lowered_from": None,
    }


def test_a_stream_is_the_whole_answer_in_pieces(client, running):
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=ASKED,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == words(running.engine.seen[-1], 5)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage.buddy["source"] == "default"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_depth_comes_only_to_who_asks_and_lights_the_budgets_blocks(client):
    def runs(**options):
        stream = client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=6, stream=True, **options
        )
        return [run for chunk in stream for run in getattr(chunk, "buddy", {}).get("runs", [])]

    wanted = {"budget": "18 blocks", "stream_options": {"include_depth": True}}
    with_depth = runs(extra_body=wanted)
    assert len(with_depth) == 6
    assert {len(run) for run in with_depth} == {30}
    assert {run.count("1") for run in with_depth} == {18}
    assert len(set(with_depth)) > 1
    assert runs(extra_body={"budget": "18 blocks"}) == []


def test_n_answers_have_seeds_of_their_own_and_one_prompt(client, running):
    made = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=3, n=3, seed=7)
    requests = running.engine.seen[-3:]
    assert [sent.sampling.seed for sent in requests] == [7, 8, 9]
    assert [sent.is_first for sent in requests] == [True, False, False]
    by_seed = {sent.sampling.seed - 7: words(sent, 3) for sent in requests}
    assert {c.index: c.message.content for c in made.choices} == by_seed
    assert len(set(by_seed.values())) == 3
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 9)


def test_several_answers_stream_side_by_side(client, running):
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(
        model="tiny", prompt="w9", max_tokens=4, n=2, seed=1, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert sorted(texts.values()) == sorted(words(sent, 4) for sent in running.engine.seen[-2:])


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("w9 w8", [(9, 8)]),
        ([9, 8], [(9, 8)]),
        (["w9", "w8 w7"], [(9,), (8, 7)]),
        ([[9], [8, 7]], [(9,), (8, 7)]),
    ],
)
def test_prompts_are_texts_or_token_ids_or_lists_of_either(client, running, prompt, ids):
    made = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    requests = running.engine.seen[-len(ids) :]
    assert [sent.prompt for sent in requests] == ids
    assert [sent.is_first for sent in requests] == [True, False][: len(ids)]
    assert len(made.choices) == len(ids)
    assert made.usage.prompt_tokens == sum(map(len, ids))
    assert made.choices[0].text == words(running.engine.seen[-len(ids)], 2)


def test_a_stop_string_ends_the_answer(client, running):
    first = client.completions.create(model="tiny", prompt="w9", max_tokens=5).choices[0].text
    third = first.split()[2]
    made = client.completions.create(model="tiny", prompt="w9", max_tokens=5, stop=third)
    assert running.engine.seen[-1].stop == (third,)
    assert made.choices[0].text == first.split(third)[0]
    assert made.choices[0].finish_reason == "stop"


def test_a_special_token_as_a_stop_string_is_a_stop_token(client, running):
    client.completions.create(model="tiny", prompt="w9", max_tokens=2, stop=["<s>", "w"])
    request = running.engine.seen[-1]
    assert (request.stop, request.stop_tokens) == (("<s>", "w"), frozenset({1}))


def test_a_template_that_knows_of_thinking_thinks_only_where_it_is_asked_to(running):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ 'w7' if enable_thinking | default(true) else 'w8' }}"
    reader = PromptReader(tokenizer)
    asked = [Message(role="user", content="w10")]
    assert reader.chat(Conversation(messages=asked)) == (8,) == tuple(encode_chat(tokenizer, "w10"))
    thinks = {"enable_thinking": True}
    assert reader.chat(Conversation(messages=asked, variables=thinks)) == (7,)


@pytest.mark.parametrize("name", ["self", "tokenizer", "messages", "padding"])
def test_what_is_no_variable_of_a_template_is_refused_whatever_the_template_reads(name):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = f"{{{{ '{name}' if {name} else 'w8' }}}}"
    asked = Conversation(messages=[Message(role="user", content="w10")], variables={name: 1})
    with pytest.raises(Refusal, match="not for callers to set"):
        PromptReader(tokenizer).chat(asked)


def test_logprobs_of_a_chat(client, running):
    made = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=2, logprobs=True, top_logprobs=2
    )
    token = token_at(running.engine.seen[-1], 0)
    first, second = made.choices[0].logprobs.content
    assert (first.token, first.logprob, bytes(first.bytes)) == (
        f" w{token}",
        -0.5,
        f" w{token}".encode(),
    )
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [
        (f" w{token}", -0.5),
        (f" w{token + 1}", -1.5),
    ]
    assert second.token != first.token


def test_logprobs_of_a_completion_whole_and_streamed(client):
    options = {"model": "tiny", "prompt": "w9", "max_tokens": 3, "logprobs": 1}
    choice = client.completions.create(**options).choices[0]
    whole = choice.logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == 3
    assert whole.text_offset == [choice.text.index(token.strip()) for token in whole.tokens]
    drawn = zip(whole.top_logprobs, whole.tokens, whole.token_logprobs, strict=True)
    assert all(top[token] == value for top, token, value in drawn)
    parts = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
    ]
    assert [t for part in parts for t in part.tokens] == whole.tokens
    assert [o for part in parts for o in part.text_offset] == whole.text_offset


def test_sampling_and_grammar_are_passed_on(client, running):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_completion_tokens=2,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"7": -100},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    request = running.engine.seen[-1]
    assert request.max_tokens == 2
    assert request.ignore_eos
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        *(0.5, 0.9, 5, 0.1),
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.1, {7: -100.0})
    assert request.grammar == Grammar(
        schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )


def test_null_is_as_good_as_nothing_and_what_asks_for_nothing_is_taken(client, running):
    echoed = {"role": "assistant", "content": None, "refusal": None, "tool_calls": []}
    client.chat.completions.create(
        model="tiny",
        messages=[*ASKED, echoed, *ASKED],
        max_tokens=1,
        temperature=None,
        top_p=0,
        store=False,
        metadata={"trace": "7"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="none",
        extra_body={"stop": None, "budget": None},
    )
    request = running.engine.seen[-1]
    assert request.prompt == (10, 11, 10, 11, 5)
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 0.0)
    assert request.budget == default(least=3, most=30)


def test_an_answer_that_names_no_length_may_fill_the_context(client, running):
    client.chat.completions.create(model="tiny", messages=ASKED, stop=["w"])
    assert running.engine.seen[-1].max_tokens == 256 - 3
    client.completions.create(model="tiny", prompt="w9")
    assert running.engine.seen[-1].max_tokens == 16


def test_fields_that_nobody_knows_are_ignored_and_named(client, running):
    before = running.service.num_ignored
    made = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{**ASKED[0], "cache_control": {"type": "ephemeral"}}],
        max_tokens=1,
        user="somebody",
        extra_body={"cache_salt": "7", "mirostat": 0, "length_penalty": 1.0, "é,\n": 1},
    )
    assert made.headers["X-Buddy-Ignored"] == (
        "user, cache_salt, '\\xe9?\\n', messages.cache_control"
    )
    assert running.service.num_ignored == before + 4
    assert b"\nbuddy_ignored_fields_total %d\n" % (before + 4) in running.service.metrics()
    stream = client.completions.with_raw_response.create(
        model="tiny", prompt="w9", stream=True, max_tokens=1, extra_body={"messages": [], "a": 1}
    )
    assert stream.headers["X-Buddy-Ignored"] == "a"
    whole = client.completions.with_raw_response.create(model="tiny", prompt="w9", max_tokens=1)
    assert "X-Buddy-Ignored" not in whole.headers


@pytest.mark.parametrize(
    ("path", "name", "value", "instead"),
    [
        ("responses", "response_format", {"type": "json_object"}, "use text.format"),
        ("responses", "reasoning_effort", "low", "use reasoning.effort"),
        ("responses", "stop", "w7", "leave it out"),
        ("responses", "n", 2, "leave it out"),
        ("responses", "top_k", 5, "leave it out"),
        ("responses", "messages", ASKED, "leave it out"),
        ("chat/completions", "max_output_tokens", 9, "use max_output_tokens in /v1/responses, and"),
        ("chat/completions", "text", {"format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", "suffix", "w7", "leave it out"),
        ("chat/completions", "best_of", 2, "leave it out"),
        ("chat/completions", "instructions", "w7", "leave it out"),
        ("chat/completions", "previous_response_id", "a", "leave it out"),
        ("completions", "functions", [{"name": "f"}], "leave it out"),
        ("completions", "tools", [{"type": "function"}], "leave it out"),
        ("completions", "chat_template_kwargs", {"enable_thinking": True}, "leave it out"),
        ("completions", "draft_budget", 0.5, "use drafts"),
        ("completions", "prefill_budget", 1.0, "use budget"),
        ("completions", "extra_body", {"budget": 0.5}, "as fields of the request"),
    ],
)
def test_a_field_of_another_path_or_of_python_is_not_ignored(running, path, name, value, instead):
    body = BODIES[path]
    refused = httpx.post(f"{running.url}/v1/{path}", json=body | {name: value})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert error["message"].startswith(f"{name} is not supported here: ")
    assert instead in error["message"]
    assert httpx.post(f"{running.url}/v1/{path}", json=body | {name: None}).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_a_field_of_another_path_that_asks_for_nothing_is_taken(running, path):
    more = {"n": 1, "best_of": 1, "top_k": -1, "stop": [], "tools": [], "text": {}}
    more["response_format"] = {"type": "text"}
    reply = httpx.post(f"{running.url}/v1/{path}", json=BODIES[path] | more)
    assert reply.status_code == 200, reply.text
    assert "X-Buddy-Ignored" not in reply.headers


def test_a_slip_of_a_name_is_no_unknown_field(client):
    with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
        client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"temprature": 0})


def test_who_ends_an_answer_is_passed_on(client, running):
    client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_tokens=5,
        extra_body={"stop_token_ids": [7, 9], "min_tokens": 3, "skip_special_tokens": False},
    )
    request = running.engine.seen[-1]
    assert (request.stop_tokens, request.min_tokens) == (frozenset({7, 9}), 3)
    assert request.shown_tokens == frozenset(running.service.reader.special.values())


def test_the_last_message_goes_on_or_no_answer_is_begun(client, running):
    goes_on = [*ASKED, {"role": "assistant", "content": "w12 w14"}]
    for more, prompt in (
        ({"continue_final_message": True}, (10, 11, 12, 14)),
        ({"add_generation_prompt": False}, (10, 11, 12, 14, 6)),
        ({}, (10, 11, 12, 14, 5)),
        ({"add_special_tokens": True}, (10, 11, 12, 14, 5)),
    ):
        client.chat.completions.create(
            model="tiny", messages=goes_on, max_tokens=1, extra_body=more
        )
        request = running.engine.seen[-1]
        assert request.prompt == prompt
        assert request.continues == bool(more.get("continue_final_message"))


def test_what_is_thought_first_is_told_apart(running):
    """A model that has opened its thinking in the prompt, and never closes it."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% else %}</think>{% endif %}"
    with (
        served(tokenizer=tokenizer) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(*, thinks, **more):
            extra = {"chat_template_kwargs": {"enable_thinking": thinks}}
            return client.chat.completions.create(
                model="tiny", messages=ASKED, max_tokens=3, seed=1, extra_body=extra, **more
            )

        message = ask(thinks=True).choices[0].message
        assert message.reasoning_content == words(running.engine.seen[-1], 3)
        assert message.content == ""
        chunks = list(ask(thinks=True, stream=True))
        thought = [getattr(c.choices[0].delta, "reasoning_content", "") or "" for c in chunks]
        assert "".join(thought) == message.reasoning_content
        message = ask(thinks=False).choices[0].message
        assert message.content == words(running.engine.seen[-1], 3)
        assert not hasattr(message, "reasoning_content")


def test_another_model_is_404(client):
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not served here"):
        client.chat.completions.create(model="gpt-9", messages=ASKED)


@pytest.mark.parametrize(
    ("path", "body"), [("tokenize", {"prompt": "w9"}), ("detokenize", {"tokens": [9]})]
)
def test_tokens_are_those_of_the_model_that_is_named(running, path, body):
    def post(model):
        return httpx.post(f"{running.url}/{path}", json={**body, "model": model})

    for model in (None, "tiny", "tiny@0.6"):
        reply = post(model)
        assert reply.status_code == 200, reply.text
        assert "x-buddy-ignored" not in reply.headers
    assert post("gpt-9").status_code == 404
    assert post("tiny@7").status_code == 400


def test_the_model_is_listed_and_found_with_a_budget_in_its_name(client):
    (listed,) = client.models.list()
    assert (listed.id, listed.max_model_len) == ("tiny", 256)
    assert client.models.retrieve("tiny@0.6").id == "tiny@0.6"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_async_client_streams_too(running):
    import asyncio

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="tiny@0.5", messages=ASKED, max_tokens=3, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(ask()) == words(running.engine.seen[-1], 3)
    assert running.engine.seen[-1].budget == fixed(prefill=15, decode=15)
