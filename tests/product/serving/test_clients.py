"""Bodies that clients have sent are answered, whole or as a stream.

`clients.jsonl` has what langchain-openai 1.7.4 and litellm 1.110.2 sent to a server that kept it:
chats, plain and streamed, options, tools and their answers, structured output, completions and
responses.
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
def test_what_a_client_sends_is_answered(running, sent):
    body = sent["body"]
    if "max_tokens" not in body:
        body = {**body, "max_output_tokens" if "input" in body else "max_tokens": 3}
    before = running.service.num_ignored
    reply = httpx.post(running.url + sent["path"], json=body)
    assert reply.status_code == 200, reply.text
    is_marked = "cache_control" in json.dumps(body)
    assert running.service.num_ignored == before + is_marked
    asked = running.engine.seen[-1]
    tools = body.get("tools")
    assert (asked.grammar is not None) == bool(tools or body.get("response_format"))
    if body.get("stream"):
        assert reply.text.endswith("data: [DONE]\n\n")
