"""The server over the real engine, on a tiny model: what clients get is what `generate` makes."""

import json
import re
from fractions import Fraction

import httpx
import openai
import pytest
import torch

from buddy import BuddyForCausalLM
from buddy.serving.control.admission import AdmissionConfig
from buddy.serving.control.controller import ControlConfig
from buddy.serving.rows import calibrate
from buddy.serving.rows.engine import ServingThread
from buddy.serving.start import start_engine
from tests.product.engine.test_steering import ByNorm
from tests.product.generation.test_ledger_budget import random_ledger
from tests.product.serving.serving import chat_tokenizer, served, until
from tests.tiny import NUM_BLOCKS, tiny_buddy, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_buddy()


@pytest.fixture(scope="module")
def running(model):
    tokenizer = chat_tokenizer()
    with served(ServingThread(model, tokenizer, "tiny"), tokenizer=tokenizer) as running:
        yield running


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def words(model, prompt, blocks, tokens):
    """What `generate` says."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, budget=f"{blocks} blocks", max_new_tokens=tokens, do_sample=False)
    return chat_tokenizer().decode(out[0, len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize("blocks", [3, 4, NUM_BLOCKS])
def test_greedy_text_is_that_of_generate_at_the_same_budget(client, model, blocks):
    made = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "w10 w11"}],
        max_tokens=12,
        temperature=0,
        extra_body={"budget": f"{blocks} blocks", "ignore_eos": True},
    )
    expected = words(model, [10, 11, 5], blocks, 12)
    assert made.choices[0].message.content.split() == expected.split()
    assert made.usage.buddy["budget_blocks"] == blocks
    assert made.usage.buddy["blocks_per_token"] == blocks


@pytest.mark.parametrize("prefill", [None, 1.0])
def test_a_mean_is_spent_as_generate_spends_it(prefill):
    made, tokenizer = tiny_buddy(), chat_tokenizer()
    made.ledger = random_ledger()
    ids = [10, 11, 12]
    out = made.generate(
        torch.tensor([ids]), budget="mean:0.75", prefill_budget=prefill, max_new_tokens=12,
        do_sample=False,
    )[0].tolist()  # fmt: skip
    expected = made.ledger.budget(Fraction(9, 2)).levels(out[3:-1])
    with served(ServingThread(made, tokenizer, "tiny"), tokenizer=tokenizer) as running:
        budget = {"mean": 0.75} if prefill is None else {"mean": 0.75, "prefill": prefill}
        body = {"model": "tiny", "prompt": ids, "max_tokens": 12, "temperature": 0,
                "ignore_eos": True, "stream": True, "budget": budget,
                "stream_options": {"include_depth": True, "include_usage": True}}  # fmt: skip
        for _ in range(2):  # the second time the prompt comes from the cache
            reply = httpx.post(f"{running.url}/v1/completions", json=body)
            chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if "{" in line]
            runs = [run for chunk in chunks for run in (chunk.get("buddy") or {}).get("runs", [])]
            assert [run.count("1") for run in runs[1:]] == expected
            assert runs[0].count("1") == (4 if prefill is None else NUM_BLOCKS)
            used = next(chunk["usage"]["buddy"] for chunk in chunks if chunk.get("usage"))
            assert used["source"] == "mean"
            assert used["budget_blocks"] == max(run.count("1") for run in runs)
        body["budget"] = {"mean": 0.2}
        refused = httpx.post(f"{running.url}/v1/completions", json=body)
        assert refused.status_code == 400
        assert "outside what this model's ledger spends" in refused.text


def test_the_runs_of_each_token_are_exactly_the_budget(client):
    stream = client.completions.create(
        model="tiny@4 blocks",
        prompt=[10, 11, 12],
        max_tokens=10,
        temperature=0,
        stream=True,
        extra_body={
            "ignore_eos": True,
            "stream_options": {"include_depth": True, "include_usage": True},
        },
    )
    chunks = list(stream)
    runs = [
        run for chunk in chunks for run in (getattr(chunk, "buddy", None) or {}).get("runs", [])
    ]
    assert len(runs) == 10
    assert all(re.fullmatch(f"[01]{{{NUM_BLOCKS}}}", run) for run in runs)
    assert {run.count("1") for run in runs} == {4}
    assert chunks[-1].usage.completion_tokens == 10


def test_requests_side_by_side_get_what_each_gets_alone(running, model):
    import asyncio

    prompts = [[10 + i, 20 + i, 30 + i] for i in range(8)]
    budgets = [3, 6, 4, 5, 3, 6, 4, 5]

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0
        ) as client:
            calls = [
                client.completions.create(
                    model="tiny",
                    prompt=prompt,
                    max_tokens=8,
                    temperature=0,
                    seed=1,  # routed apart
                    extra_body={"budget": f"{blocks} blocks", "ignore_eos": True},
                )
                for prompt, blocks in zip(prompts, budgets, strict=True)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    for text, prompt, blocks in zip(asyncio.run(ask()), prompts, budgets, strict=True):
        assert text.split() == words(model, prompt, blocks, 8).split()


def test_a_client_that_leaves_frees_its_rows(running):
    for stream in (True, False):
        content = json.dumps({"prompt": [10], "n": 3, "max_tokens": 60, "stream": stream,
                              "ignore_eos": True}).encode()  # fmt: skip
        with running.connect() as made:
            made.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(content) + content
            )
            until(lambda: running.service.under_way)
        until(lambda: not running.service.under_way)
    until(lambda: running.engine.gauges.running == 0 and running.engine.gauges.waiting == 0)
    reply = httpx.post(f"{running.url}/v1/completions", json={"prompt": [9], "max_tokens": 2})
    assert reply.status_code == 200


def test_json_obeys_its_schema_and_a_schema_that_is_none_is_400():
    from tests.product.serving.made import byte_buddy, byte_tokenizer

    def body(kind):
        schema = {"type": "object", "properties": {"a": {"type": kind}}, "required": ["a"]}
        wanted = {"name": "x", "schema": {**schema, "additionalProperties": False}}
        return {
            "prompt": "a",
            "max_tokens": 40,
            "response_format": {"type": "json_schema", "json_schema": wanted},
        }

    tokenizer = byte_tokenizer()
    with served(ServingThread(byte_buddy(), tokenizer, "tiny"), tokenizer=tokenizer) as running:
        made = httpx.post(f"{running.url}/v1/completions", json=body("boolean"), timeout=20)
        assert type(json.loads(made.json()["choices"][0]["text"])["a"]) is bool
        refused = httpx.post(f"{running.url}/v1/completions", json=body("nonsense"), timeout=20)
        assert refused.status_code == 400
        assert "\n" not in refused.json()["error"]["message"]


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts an engine as `buddy serve` does."""
    monkeypatch.setattr(calibrate, "cache_home", lambda: tmp_path)

    def start(model, min_blocks=3):
        return start_engine(
            model,
            chat_tokenizer(),
            "tiny",
            ControlConfig(
                num_blocks=model.num_blocks, min_blocks=min_blocks, max_rows=2, itl_ms=1000.0
            ),
            AdmissionConfig(max_queue=2),
        )

    return start


@pytest.mark.parametrize("policy", ["full", ByNorm(range(2, 5))], ids=["pinned", "online"])
def test_a_policy_that_leaves_no_choice_serves_who_names_no_budget(policy, started):
    with served(started(BuddyForCausalLM(tiny_model(), policy=policy), NUM_BLOCKS)) as running:

        def status(**budget):
            body = {"prompt": "w5 w6", "max_tokens": 2, **budget}
            return httpx.post(f"{running.url}/v1/completions", json=body).status_code

        assert status() == status(budget=1.0) == 200
        assert status(budget=0.5) == 400
        facts = httpx.get(f"{running.url}/v1/models/tiny").json()["buddy"]
        assert facts["least_blocks"] == NUM_BLOCKS


def test_an_idle_server_takes_as_many_answers_as_it_holds_and_never_more(started, model):
    with served(started(model)) as running:

        def status(answers):
            body = {"prompt": "w5 w6", "max_tokens": 20, "ignore_eos": True, "n": answers}
            return httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).status_code

        assert [status(4) for _ in range(3)] == [200] * 3
        assert status(5) == 400
