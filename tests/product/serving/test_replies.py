"""Replies to the byte: `replies.jsonl` has what clients got before models made the replies."""

import json
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from pydantic import TypeAdapter
from starlette.responses import JSONResponse

from buddy.serving.http import schema
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.refusals import Refusal, failed
from buddy.serving.http.replies import DONE, ChatShape, CompletionShape, Extras, Reply, event
from buddy.serving.http.service import Service
from buddy.serving.request import Delta, Failed, Finished, TokenLogprobs, Usage
from tests.product.serving.made import byte_tokenizer
from tests.product.serving.scripted import ScriptedEngine

GOLDEN = Path(__file__).with_name("replies.jsonl")
SHAPES = {"chat": ChatShape, "completion": CompletionShape}
EXTRAS = {
    "plain": Extras(),
    "logprobs": Extras(logprobs=True),
    "all": Extras(logprobs=True, usage=True, depth=True),
}


def usage(number, **fields):
    return Usage(
        **{
            "prompt_tokens": 3,
            "cached_tokens": 1,
            "completion_tokens": 2 + number,
            "blocks_executed": 40,
            "budget_blocks": 18,
            "blocks_per_token": 17.3,
            "distinct_plans": 2,
            "source": "auto",
            "lowered_from": None,
            **fields,
        }
    )


def logprob(token, value, offset):
    top = ((token, value), (token + 1, -1e-7), (200, float("-inf")))
    return TokenLogprobs(token=token, logprob=value, top=top, offset=offset)


def deltas():
    """Text, a token without text, a sign outside ASCII, and a line end of Unicode."""
    ran = np.array([True, False, True])
    yield Delta(text="Hé", tokens=(72, 233), logprobs=(logprob(72, -0.25, 0),), runs=(ran, ~ran))
    yield Delta(text="", tokens=(195,), logprobs=(logprob(195, -1e-5, 2),), runs=(ran,))
    yield Delta(text="\u2028🙂\n", tokens=())


def replies():
    """The bytes of every kind of reply, by name."""
    reader = PromptReader(byte_tokenizer())
    for shape_name, shape in SHAPES.items():
        for extras_name, extras in EXTRAS.items():

            def reply(shape=shape, extras=extras):
                return Reply(
                    shape(),
                    model="tiny@0.6",
                    num_blocks=30,
                    num_answers=2,
                    per_prompt=2,
                    extras=extras,
                    reader=reader,
                )

            name, whole, stream = f"{shape_name} {extras_name}", reply(), reply()
            for delta in deltas():
                whole.add(0, delta)
            whole.end(0, Finished(reason="stop", usage=usage(0)))
            whole.end(1, Finished(reason="length", usage=usage(1, lowered_from=30)))
            yield f"{name} whole", whole.whole()
            chunks = [stream.chunk(0, delta) for delta in deltas()]
            for index, reason in enumerate(("stop", "length")):
                stream.end(index, Finished(reason=reason, usage=usage(index)))
                chunks.append(stream.last_chunk(index))
            yield f"{name} stream", b"".join([*chunks, stream.closing()])
    engine = ScriptedEngine(str)
    engine.close(1.0)
    rules = BudgetRules(num_blocks=30, has_predictor=True)
    service = Service(engine=engine, reader=reader, rules=rules, started=9)
    yield "model", JSONResponse(service.model()).body
    refusal = Refusal(404, "not\nhere", param="model", code="model_not_found")
    yield "refusal", bytes(refusal.response().body)
    yield "failure", event(failed(Failed(message="the server failed")).body()) + DONE


def test_every_reply_is_what_it_was_to_the_byte(monkeypatch):
    monkeypatch.setattr(uuid, "uuid4", lambda: SimpleNamespace(hex="0f" * 16))
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.9)
    monkeypatch.setattr("buddy.serving.http.replies.__version__", "1.2.3")
    golden = dict(map(json.loads, GOLDEN.read_text().splitlines()))
    made = {name: body.decode() for name, body in replies()}
    assert list(made) == list(golden)
    for name, text in made.items():
        assert text == golden[name], name


def test_every_reply_is_of_its_model():
    kinds = {"chat": schema.ChatCompletion, "completion": schema.Completion}
    kinds |= {"model": schema.ModelBody, "refusal": schema.ErrorBody}
    for name, body in replies():
        if name.endswith("stream") or name == "failure":
            kind = schema.Chunk if name != "failure" else schema.ErrorBody
            *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
            assert done == DONE.strip()
        else:
            kind, events = kinds[name.split()[0]], [b"data: " + body]
        for line in events:
            TypeAdapter(kind).validate_json(line.removeprefix(b"data: "), strict=True)


def test_a_completions_alternatives_have_the_drawn_token_too():
    drawn = TokenLogprobs(token=72, logprob=-3.0, top=((101, -0.25),))
    made = CompletionShape().logprobs([drawn], PromptReader(byte_tokenizer()))
    names = PromptReader(byte_tokenizer()).token_text
    assert made["top_logprobs"] == [{names(101)[0]: -0.25, names(72)[0]: -3.0}]
