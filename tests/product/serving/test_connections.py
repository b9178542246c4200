"""Clients that hold connections, and send nothing or too much on them, shut nobody out."""

import resource
import time

import httpx
import pytest

from buddy.errors import ServingError
from buddy.serving.http import connections
from buddy.serving.http.auth import Keys
from buddy.serving.http.guards import Patience
from buddy.serving.http.server import most_connections
from tests.product.serving.serving import served, until
from tests.product.serving.test_leaving import post

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def is_open(made):
    made.setblocking(False)
    try:
        return made.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_idle_connections_give_way_and_answers_do_not():
    with served(step_s=0.02, connections=24) as running:
        streaming = running.connect()
        streaming.sendall(post({"prompt": "w9", "max_tokens": 200, "stream": True}))
        until(lambda: running.engine.in_flight == 1)
        half = post({"prompt": "w9"})
        idle = []
        for number in range(60):
            idle.append(running.connect())
            idle[-1].sendall((b"", HEAD, half[:-3])[number % 3])
        assert httpx.get(f"{running.url}/health").status_code == 200
        until(lambda: sum(map(is_open, idle)) <= 24)
        # Of those that came last most are left.
        assert sum(map(is_open, idle[-20:])) > sum(map(is_open, idle[:20])) == 0
        assert running.engine.in_flight == 1
        for made in (streaming, *idle):
            made.close()


def test_a_head_that_is_dripped_is_cut_on_a_used_connection_too(monkeypatch):
    monkeypatch.setattr(connections, "_HEAD_S", 0.3)
    with served() as running, running.connect() as first, running.connect() as second:
        second.sendall(HEAD + b"\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        for made in (first, second):
            made.sendall(HEAD)
        while any(map(is_open, (first, second))):
            assert time.monotonic() - began < 5
            for made in (first, second):
                made.setblocking(True)
                try:
                    made.sendall(b"x: y\r\n")
                except ConnectionError:
                    continue
            time.sleep(0.05)
        assert time.monotonic() - began > 0.2


def test_a_quick_request_is_not_cut_by_the_clock_of_its_head(monkeypatch):
    monkeypatch.setattr(connections, "_HEAD_S", 0.2)
    with served(step_s=0.02) as running, httpx.Client(base_url=running.url) as client:
        for _ in range(2):
            reply = client.post("/v1/completions", json={"prompt": "w9", "max_tokens": 25})
            assert reply.status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing"])
def test_a_body_that_nobody_takes_is_not_read(method, path):
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with served(keys=Keys(["k" * 16])) as running, running.connect() as made:
        made.sendall(head.encode() + b"x" * 1000)
        reply = b""
        while got := made.recv(4096):  # the connection ends with the answer
            reply += got
        assert b"connection: close" in reply.lower()


def test_large_bodies_are_bounded_together_and_small_ones_are_taken():
    patience = Patience(body_bytes=100_000)
    with served(patience=patience) as running:
        head = post({"prompt": "w9"}).partition(b"Content-Length")[0]
        held = [running.connect() for _ in range(20)]
        for made in held:
            made.sendall(head + b"Content-Length: 100000\r\n\r\n" + b" " * 90_000)
        body = {"prompt": "w9", "max_tokens": 2}
        url = f"{running.url}/v1/completions"

        def refused():
            return httpx.post(url, json=body | {"user": "a" * 80_000}).status_code == 429

        until(refused)
        assert httpx.post(url, json=body).status_code == 200
        for made in held:
            made.close()
        until(lambda: not refused())


def test_a_limit_on_open_files_that_is_too_low_is_said_when_the_server_starts(monkeypatch):
    made = []
    limits = {"limit": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["limit"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: made.append(limit))
    assert most_connections(160) == 576
    assert made == []
    assert most_connections(1000) == 2256
    assert made == [(2512, 4096)]
    with pytest.raises(ServingError, match=r"lower --max-rows and --max-queue"):
        most_connections(4000)
