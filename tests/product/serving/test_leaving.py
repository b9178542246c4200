"""Clients that leave, or never read, hold nothing; SIGTERM lets answers finish and exits 0."""

import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from buddy.errors import ServingError
from buddy.serving.http.guards import Patience
from buddy.serving.http.server import Address, check_reach, listen
from tests.product.serving.scripted import ScriptedEngine
from tests.product.serving.serving import chat_tokenizer, served, until


def post(body):
    """The bytes of a request."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + content


def test_200_disconnects_streaming_and_not_free_every_request():
    draw = random.Random(0)
    with served(step_s=0.005, max_rows=32, max_queue=400) as running:
        made = []
        for number in range(200):
            # Those beyond 32 wait; no answer ends by itself in this test.
            client = running.connect()
            body = {"prompt": "w9", "max_tokens": 250, "stream": number % 2 == 0, "n": 1}
            client.sendall(post(body))
            made.append(client)
            if draw.random() < 0.5:  # one that leaves before it was heard would be none
                until(lambda sent=number + 1: len(running.engine.seen) == sent)
                _leave(made.pop(draw.randrange(len(made))), draw)
        until(lambda: len(running.engine.seen) == 200)
        for client in made:
            _leave(client, draw)
        until(lambda: running.engine.in_flight == 0 and not running.service.under_way)
        engine = running.engine
        ended = engine.cancelled | engine.finished
        assert ended == set(range(1, len(engine.seen) + 1))
        assert len(engine.cancelled) > 150
        assert "\nbuddy_requests 0\n" in httpx.get(f"{running.url}/metrics").text
        reply = httpx.post(f"{running.url}/v1/completions", json={"prompt": "w9", "max_tokens": 2})
        assert reply.status_code == 200


def _leave(client, draw):
    """Close a connection, some by a reset."""
    if draw.random() < 0.5:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_a_client_that_leaves_behind_a_pipelined_request_is_noticed():
    with served(step_s=0.01) as running, running.connect() as made:
        for _ in range(2):
            made.sendall(post({"prompt": "w9", "max_tokens": 250}))
            until(lambda: running.engine.in_flight == 1)
            time.sleep(0.3)  # the server listens for what follows, and reads it
        made.close()
        until(lambda: running.engine.in_flight == 0, 1.0)
        assert len(running.engine.cancelled) == 1


def test_n_answers_are_all_cancelled():
    with served(step_s=0.01) as running, running.connect() as made:
        made.sendall(post({"prompt": ["w9", "w8"], "n": 3, "max_tokens": 200, "stream": False}))
        until(lambda: running.engine.in_flight == 6)
        made.close()
        until(lambda: running.engine.in_flight == 0)
        assert len(running.engine.cancelled) == 6


def test_a_client_that_never_reads_is_cancelled_and_others_go_on():
    tokenizer = chat_tokenizer()
    # Text that fills the buffers of both ends soon.
    engine = ScriptedEngine(lambda token: "w" * 60_000, step_s=0.0)
    engine.facts = _wider(engine.facts)
    patience = Patience(stall_s=1.0)
    with served(engine, tokenizer=tokenizer, patience=patience) as running:
        with running.connect(receive_buffer=4096) as silent:
            silent.sendall(post({"prompt": "w9", "max_tokens": 50_000, "stream": True}))
            until(lambda: engine.in_flight == 1)
            other = httpx.post(
                f"{running.url}/v1/completions", json={"prompt": "w9", "max_tokens": 2}
            )
            assert other.status_code == 200
            until(lambda: engine.cancelled == {1})
            assert engine.in_flight == 0
            until(lambda: not running.service.under_way)
            silent.settimeout(10)
            size = 0
            while got := silent.recv(65536):  # the connection ends, and is not whole
                size += len(got)
        assert size < 20e6


def _wider(facts):
    from dataclasses import replace

    return replace(facts, context=100_000)


# Without torch, so that it starts soon.
SERVER = """
import sys
from tests.product.serving.scripted import ScriptedEngine
from buddy.serving.http.app import make_app
from buddy.serving.http.service import Service
from buddy.serving.http.prompts import PromptReader
from buddy.serving.http.server import Address, listen, serve, url_of
from buddy.serving.http.budget_rules import BudgetRules

class Letters:
    chat_template = bos_token_id = None
    def __len__(self):
        return 128
    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % 128 for letter in text]}
    def decode(self, ids):
        return "".join(map(chr, ids))

letters = Letters()
service = Service(
    engine=ScriptedEngine(lambda token: letters.decode([token]), step_s=0.02),
    reader=PromptReader(letters),
    rules=BudgetRules(num_blocks=30, has_predictor=True),
)
assert "torch" not in sys.modules
if "fails" in sys.argv:
    service.engine.cancel = lambda number: service.engine.fail()  # by whoever leaves
with listen(Address(host="127.0.0.1", port=0)) as listener:
    print(url_of(listener), flush=True)
    sys.exit(not serve(make_app(service), service, listener, drain_s=float(sys.argv[1])))
"""


@pytest.fixture
def process():
    started = []

    def start(drain_s, *more):
        root = Path(__file__).parents[3]
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(drain_s), *more],
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        url = server.stdout.readline().strip()
        client = httpx.Client(base_url=url, timeout=20)
        started.append((server, client))
        until(lambda: client.get("/ready").status_code == 200)
        return server, client

    yield start
    for server, client in started:
        client.close()
        server.kill()
        server.communicate()


def _asked(client, tokens):
    """The status and text of an answer that is under way."""
    got = {}

    def ask():
        try:
            reply = client.post("/v1/completions", json={"prompt": "w9", "max_tokens": tokens})
            got.update(status=reply.status_code, body=reply.json())
        except (httpx.HTTPError, ValueError) as error:  # cut off
            got.update(status=type(error).__name__)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: "buddy_requests 1" in client.get("/metrics").text)
    return thread, got


def test_sigterm_lets_answers_finish_and_exits_0(process):
    server, client = process(20)
    half = socket.create_connection((client.base_url.host, client.base_url.port))
    half.sendall(post({"prompt": "w9"})[:-3])
    thread, got = _asked(client, 50)
    server.send_signal(signal.SIGTERM)
    until(lambda: client.get("/ready").status_code == 503)
    refused = client.post("/v1/completions", json={"prompt": "w9"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    thread.join(10)
    assert got["body"]["usage"]["completion_tokens"] == 50
    assert server.wait(10) == 0
    half.close()
    assert "Traceback" not in server.stderr.read()


def test_draining_is_bounded_and_a_second_signal_ends_it_at_once(process):
    server, client = process(0.3)
    thread, got = _asked(client, 250)
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    thread.join(5)
    assert got["status"] == 500
    assert got["body"]["error"]["message"] == "the server ended before the answer did"

    server, client = process(60)
    thread, _ = _asked(client, 250)
    with socket.create_connection((client.base_url.host, client.base_url.port)) as half:
        half.sendall(post({"prompt": "w9"})[:-3])
        server.send_signal(signal.SIGINT)
        until(lambda: client.get("/ready").status_code == 503)
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    thread.join(5)
    assert "Traceback" not in server.stderr.read()


def test_an_engine_that_has_failed_ends_the_process(process):
    server, client = process(60, "fails")
    thread, got = _asked(client, 250)
    with socket.create_connection((client.base_url.host, client.base_url.port)) as leaver:
        leaver.sendall(post({"prompt": "w9", "max_tokens": 250}))
        until(lambda: "buddy_requests 2" in client.get("/metrics").text)
    thread.join(10)
    assert got["status"] == 500
    assert "the engine has failed" in got["body"]["error"]["message"]
    assert server.wait(10) == 1
    assert "Traceback" not in server.stderr.read()


def test_a_port_in_use_and_a_host_that_is_none_are_one_line():
    with listen(Address(host="127.0.0.1", port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ServingError, match=f"port {port} of 127.0.0.1 is in use: stop"):
            listen(Address(host="127.0.0.1", port=port))
    with pytest.raises(ServingError, match="cannot be"):
        listen(Address(host="192.0.2.1", port=0))
    with pytest.raises(ServingError, match="cannot be"):
        listen(Address(host="a" * 80, port=0))
    with pytest.raises(ServingError, match="port must be at least 0 and at most 65,535"):
        Address(host="127.0.0.1", port=65536)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "models.example", ""])
def test_others_are_served_only_with_keys(host):
    with pytest.raises(ServingError, match="give --api-key-file"):
        check_reach(Address(host=host, port=1), has_keys=False)
    check_reach(Address(host=host, port=1), has_keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_is_served_without_keys(host):
    check_reach(Address(host=host, port=1), has_keys=False)
