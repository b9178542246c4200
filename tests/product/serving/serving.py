"""Servers for tests: uvicorn in a thread, with a scripted engine or another."""

import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from buddy.serving.http.app import make_app
from buddy.serving.http.budget_rules import BudgetRules
from buddy.serving.http.defaults import Defaults
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.server import Address, listen, make_server, url_of
from buddy.serving.http.service import Service
from tests.product.serving.scripted import ScriptedEngine
from tests.words import word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'w13 w13' %}{{ raise_exception('unlucky') }}"
    "{% endif %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %} w5{% else %} w6{% endif %}"
)


def chat_tokenizer():
    """Words, with a chat template that is all messages, and w5 where an answer begins."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class Running:
    """A server that answers."""

    url: str
    engine: Any
    service: Service

    @property
    def address(self):
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def connect(self, receive_buffer=None):
        """A bare connection."""
        made = socket.socket()
        if receive_buffer is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.settimeout(10)
        made.connect(self.address)
        return made


@contextmanager
def served(
    engine=None,
    *,
    tokenizer=None,
    keys=None,
    patience=None,
    rules=None,
    defaults=None,
    connections=None,
    origins=(),
    **options,
):
    """A server in a thread; options are the scripted engine's."""
    tokenizer = tokenizer or chat_tokenizer()
    if engine is None:
        engine = ScriptedEngine(lambda token: tokenizer.decode([token]), **options)
    rules = rules or BudgetRules(
        num_blocks=engine.facts.num_blocks,
        has_predictor=engine.facts.has_predictor,
        means=engine.facts.means,
        num_pinned=engine.facts.least_blocks,
    )
    reader = PromptReader(tokenizer, context=engine.facts.context)
    service = Service(engine=engine, reader=reader, rules=rules, defaults=defaults or Defaults())
    app = make_app(service, keys=keys, patience=patience, origins=origins)
    server = make_server(app, connections=connections)
    with listen(Address(host="127.0.0.1", port=0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        until(lambda: server.started)
        try:
            yield Running(url_of(listener), engine, service)
        finally:
            server.should_exit = True
            thread.join(10)
            engine.close(2.0)
            assert not thread.is_alive()


def until(holds, seconds=10.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.005)
