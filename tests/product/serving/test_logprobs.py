"""Log-probabilities name the bytes of tokens, lose no alternative and point into the text."""

import httpx
import pytest

from buddy.serving.http.prompts import PromptReader
from buddy.serving.rows.engine import ServingThread
from tests.product.serving.made import END, byte_buddy, byte_tokenizer, fallback_tokenizer
from tests.product.serving.serving import served

SAID = "日本🙂 ok é"


@pytest.fixture(scope="module")
def running():
    tokenizer = byte_tokenizer()
    engine = ServingThread(byte_buddy(ends=END), tokenizer, "tiny")
    with served(engine, tokenizer=tokenizer) as running:
        yield running


def completion(running, **body):
    body = {"prompt": "ab", "max_tokens": 40, "temperature": 0, "logprobs": 5} | body
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).json()
    return answer["choices"][0]


def const(text):
    """Makes the model say this, in quotes."""
    schema = {"name": "x", "schema": {"const": text}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize("make", [byte_tokenizer, fallback_tokenizer])
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    tokenizer = make()
    reader = PromptReader(tokenizer)
    ids = tokenizer(SAID, add_special_tokens=False).input_ids
    made = [reader.token_text(token) for token in ids]
    assert bytes(byte for _, utf8 in made for byte in utf8).decode().strip() == SAID
    assert made[-1][0] in ("é", r"bytes:\xa9")
    assert r"bytes:\xe6" in [name for name, _ in made]


def test_special_tokens_and_ids_without_a_token_have_names_too():
    reader = PromptReader(byte_tokenizer())
    assert reader.token_text(END) == ("</s>", list(b"</s>"))
    assert reader.token_text(10**6) == ("", [])


def test_each_offset_is_the_character_that_its_token_is_part_of(running):
    choice = completion(running, **const(SAID))
    text, logprobs = choice["text"], choice["logprobs"]
    assert text == f'"{SAID}"'
    reader, ids = PromptReader(byte_tokenizer()), byte_tokenizer()(text).input_ids
    assert logprobs["tokens"] == [reader.token_text(token)[0] for token in ids]
    reached = 0
    for offset, token in zip(logprobs["text_offset"], ids, strict=True):
        assert offset == len(text.encode()[:reached].decode(errors="ignore"))
        reached += len(reader.token_text(token)[1])


def test_a_better_alternative_is_never_lost_to_a_worse_one(running):
    made = completion(running)["logprobs"]
    for value, top in zip(made["token_logprobs"], made["top_logprobs"], strict=True):
        assert len(top) == 5, "bytes that are no character alone are told apart"
        assert max(top.values()) == value, "the greedy token is the best"
        assert list(top.values()) == sorted(top.values(), reverse=True)


def test_a_completion_keeps_the_spaces_that_its_tokens_have_and_a_chat_begins_without():
    tokenizer = fallback_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    engine = ServingThread(byte_buddy("static:2,3,4,1", vocab=len(tokenizer)), tokenizer, "tiny")
    world = tokenizer.convert_tokens_to_ids("▁world")
    always = {"max_tokens": 3, "logit_bias": {str(world): 100}}
    with served(engine, tokenizer=tokenizer) as running:
        choice = completion(running, prompt="Hello", **always)
        body = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, **always}
        chat = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=30).json()
    assert choice["text"] == " world world world"
    assert choice["logprobs"]["tokens"] == [" world"] * 3
    assert choice["logprobs"]["text_offset"] == [0, 6, 12]
    (choice,) = chat["choices"]
    assert choice["message"]["content"] == "world world world"
    assert bytes(choice["logprobs"]["content"][0]["bytes"]) == b" world"
