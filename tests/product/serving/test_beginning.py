"""Bodies that take long to read are refused before, or wait, and nobody waits for them."""

import gc
import threading
import time

import httpx
import pytest
from transformers import BatchEncoding

from buddy.serving.http.bodies import ChatBody, CompletionBody, read_body
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import Refusal
from buddy.serving.http.replies import Reply
from tests.product.serving.made import byte_tokenizer
from tests.product.serving.serving import chat_tokenizer, served, until
from tests.product.serving.test_leaving import post

MANY = 40_000
HOSTILE = {
    "messages": b'{"messages": [' + b"5," * MANY + b"5]}",
    "texts": b'{"messages": [{"role": "user", "content": [' + b"5," * MANY + b"5]}]}",
    "fields": b'{"messages": [], %s}' % b",".join(b'"%d": 0' % n for n in range(MANY)),
    "biases": b'{"messages": [], "logit_bias": {%s}}'
    % b",".join(b'"%d": "x"' % n for n in range(MANY)),
    "stops": b'{"stop": [' + b"5," * MANY + b"5]}",
    "prompts": b'{"prompt": [' + b"[]," * MANY + b"[]]}",
    "ids": b'{"prompt": [' + b'"x",' * MANY + b"5]}",
    "lists": b'{"prompt": [[' + b'"x",' * MANY + b"5]]}",
    "tools": b'{"messages": [], "tools": [' + b"{}," * MANY + b"{}]}",
    "budget": b'{"budget": {%s}}' % b",".join(b'"%d": []' % n for n in range(MANY)),
    "number": b'{"messages": [], "n": 0.' + b"1" * 2 * MANY + b"}",
    "nested": b'{"prompt": ' + b"[" * MANY,
}


@pytest.fixture
def uncollected():
    """No look through all that earlier tests have left, in the time of this one."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_a_body_of_many_faults_is_refused_at_the_first(kind, name):
    began = time.process_time()
    with pytest.raises(Refusal) as refused:
        read_body(kind, HOSTILE[name])
    assert time.process_time() - began < 1.0  # a list of all takes seconds
    assert len(str(refused.value)) < 600


class Counted:
    """A tokenizer of letters that knows how much it has read."""

    chat_template = bos_token_id = None
    read = 0

    def __len__(self):
        return 128

    def __call__(self, text, **options):
        self.read += len(text)
        return BatchEncoding({"input_ids": [ord(letter) for letter in text]})


def test_a_text_that_is_too_long_is_refused_before_it_is_read_whole():
    tokenizer = Counted()
    reader = PromptReader(tokenizer, context=10_000)
    with pytest.raises(Refusal, match="more tokens than the context of 10000") as refused:
        reader.prompts("1" * 2_000_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
    assert tokenizer.read < 30_000
    with pytest.raises(Refusal, match="more tokens"):
        reader.prompts(["w", "1" * 2_000_000])
    tokenizer.read = 0
    (ids,) = reader.prompts("1" * 20_000)  # what is too long by little is refused by its length
    assert (len(ids), tokenizer.read) == (20_000, 20_000)


def test_a_long_text_of_long_tokens_is_read():
    reader = PromptReader(chat_tokenizer(), context=20)
    text = f"w9{' ' * 500}w8"
    assert reader.prompts(text) == [(9, 8)]


def test_who_leaves_before_it_is_read_is_not_read_and_nobody_waits_for_it():
    with served() as running:
        reading, reader = threading.Event(), running.service.reader
        prompts, seen = reader.prompts, []

        def slow(prompt, **options):
            seen.append(prompt)
            reading.wait(10)
            return prompts(prompt, **options)

        reader.prompts = slow
        made = [running.connect() for _ in range(6)]
        for number, client in enumerate(made):
            client.sendall(post({"prompt": f"w{number + 5}", "max_tokens": 2, "stream": True}))
            until(lambda: len(seen) == 1)
        until(lambda: running.service.waiting == 5)
        assert httpx.get(f"{running.url}/health").status_code == 200
        for client in made:
            client.close()
        until(lambda: running.service.waiting == 0)
        reading.set()
        until(lambda: not running.service.under_way)
        reply = httpx.post(f"{running.url}/v1/completions", json={"prompt": "w9", "max_tokens": 2})
        assert reply.status_code == 200
        assert seen == ["w5", "w9"]


def test_more_than_the_engine_holds_do_not_wait_to_be_read():
    with served(max_rows=1, max_queue=1) as running:
        reading, reader = threading.Event(), running.service.reader
        prompts = reader.prompts
        reader.prompts = lambda prompt, **options: reading.wait(10) and prompts(prompt, **options)
        made = [running.connect() for _ in range(3)]
        for client in made:
            client.sendall(post({"prompt": "w9", "max_tokens": 2}))
        until(lambda: running.service.waiting == 2)
        reply = httpx.post(f"{running.url}/v1/completions", json={"prompt": "w9"})
        assert (reply.status_code, "retry-after" in reply.headers) == (429, True)
        reading.set()
        for client in made:
            client.close()


def test_a_small_body_waits_for_one_large_one_at_most():
    with served() as running:
        reader, order = running.service.reader, []
        prompts, begun = reader.prompts, threading.Event()

        def noted(prompt, **options):
            order.append(prompt.strip())
            begun.wait(10)
            return prompts(prompt, **options)

        reader.prompts = noted
        made = []
        for prompt in ("w5", "w6", "w7", "w8"):
            made.append(running.connect())
            made[-1].sendall(post({"prompt": prompt + " " * (20_000 if prompt != "w8" else 0)}))
            until(lambda: len(order) + running.service.waiting == len(made))
        begun.set()
        until(lambda: len(order) == 4)
        for client in made:
            client.close()
        assert order.index("w8") <= 2


def test_log_probabilities_are_written_beside_the_loop_and_no_token_is_read_twice(monkeypatch):
    reader = PromptReader(byte_tokenizer())
    assert reader.token_text(5) is reader.token_text(5)
    writers, whole = [], Reply.whole

    def noted(reply):
        writers.append(threading.current_thread().name)
        return whole(reply)

    monkeypatch.setattr(Reply, "whole", noted)
    body = {"prompt": "w9", "n": 3, "max_tokens": 2}
    with served() as running:
        for change in ({}, {"logprobs": 2}):
            reply = httpx.post(f"{running.url}/v1/completions", json=body | change)
            assert len(reply.json()["choices"]) == 3
    loop, other = writers
    assert [name.startswith("AnyIO") for name in (loop, other)] == [False, True]
