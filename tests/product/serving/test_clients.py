"""Bodies that clients have sent are answered, whole or as a stream, or refused by name.

`clients.jsonl` has what they sent to a server that kept it, with words in the place of texts:
langchain-openai 1.7.4, litellm 1.110.2, OpenAI's JavaScript client 6.49.0, aider 0.86.2, Open WebUI
0.12.4, `vllm bench serve` 0.32.0 and lm-eval 0.4.13. A line says what of a body is ignored, or by
which status and name it is refused; where it says neither, all of it is obeyed.
"""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.product.serving.scripted import ScriptedEngine
from tests.product.serving.serving import chat_tokenizer, served

SENT = [*map(json.loads, Path(__file__).with_name("clients.jsonl").read_text().splitlines())]
TOOLS = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }} {% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def running():
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TOOLS
    engine = ScriptedEngine(lambda token: tokenizer.decode([token]))
    engine.facts = replace(engine.facts, context=2048)
    with served(engine, tokenizer=tokenizer) as running:
        yield running


@pytest.mark.parametrize("sent", SENT, ids=lambda sent: f"{sent['client']} {sent['path']}")
def test_what_a_client_sends_is_answered_or_refused_by_name(running, sent):
    path, body = sent["path"], sent["body"]
    is_response = path == "/v1/responses"
    if path.startswith("/v1") and "max_tokens" not in body:
        body = {**body, "max_output_tokens" if is_response else "max_tokens": 3}
    reply = httpx.post(running.url + path, json=body)
    assert reply.status_code == sent.get("status", 200), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["param"] == sent.get("param")
        return
    assert reply.headers.get("x-buddy-ignored", "") == ", ".join(sent.get("ignored", ()))
    if not path.startswith("/v1"):
        return
    asked, wanted = running.engine.seen[-1], body.get("response_format") or body.get("text")
    assert (asked.grammar is not None) == bool(body.get("tools") or wanted)
    if body.get("stream"):
        assert ("response.incomplete" if is_response else "data: [DONE]\n\n") in reply.text[-2000:]
