"""The recipe's front, without Ray: what it passes on of two servers, and what it makes of failures.

The servers are real over HTTP, with scripted engines; the handles of Ray Serve are stood in for by
what gives a server's address. `test_ray.py` has all of it under Ray Serve.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request

from buddy.serving.http.server import Address, listen, make_server, url_of
from tests.deploy.recipe import load
from tests.product.serving.serving import served, until

recipe = load()


class Handle:
    """As Ray Serve's handle of a `Server`."""

    def __init__(self, url, restart=None):
        async def found():
            return self.address

        self.address = url
        self.url = SimpleNamespace(remote=found)
        self.restart = SimpleNamespace(remote=restart)


@contextmanager
def fronted(**handles):
    """`Front` before servers of 18 and 30 blocks; gives its address and itself."""
    config = recipe.Config(
        num_blocks=30,
        replica=tuple(
            recipe.Replica(name=name, budget=budget, port=1, command=())
            for name, budget in (("shallow", 0.6), ("deep", 1.0))
        ),
    )
    front = object.__new__(recipe.Front)

    @asynccontextmanager
    async def lifespan(app):
        await front.__init__(config, handles)
        yield
        for watch in front._watches:
            watch.cancel()
        await front._session.close()

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            return await inner(scope, receive, send)
        answer = await front(Request(scope, receive))
        return await answer(scope, receive, send)

    inner = Starlette(lifespan=lifespan)
    server = make_server(app)
    server.config.lifespan = "on"
    with listen(Address(host="127.0.0.1", port=0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            until(lambda: all(one.is_ready for one in front._places))
            with httpx.Client(base_url=url_of(listener), timeout=20) as client:
                yield client, front
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def ask(client, budget=None, **more):
    body = {"prompt": "w9 w8", "max_tokens": 4, **more}
    return client.post(
        "/v1/completions", json=body if budget is None else body | {"budget": budget}
    )


def by(answer):
    return answer.headers["x-buddy-replica"]


def test_classes_go_to_their_servers_and_a_refusal_passes_through_unchanged():
    with (
        served() as shallow,
        served() as deep,
        fronted(shallow=Handle(shallow.url), deep=Handle(deep.url)) as (client, _),
    ):
        shallow_budgets, deep_budgets = (0.5, "18 blocks", {"mean": 0.6}), (0.7, "mean:0.7")
        for name, budgets in (("shallow", shallow_budgets), ("deep", deep_budgets)):
            for budget in budgets:
                answer = ask(client, budget)
                assert (answer.status_code, by(answer)) == (200, name)
        assert by(ask(client)) == by(ask(client, "auto")) == "deep"
        assert len(shallow.engine.seen) == 3
        assert len(deep.engine.seen) == 4
        for wrong in (4, "much", {"mean": 4}, [1]):
            refused = ask(client, wrong)
            body = {"prompt": "w9 w8", "max_tokens": 4, "budget": wrong}
            alone = httpx.post(f"{deep.url}/v1/completions", json=body)
            assert refused.status_code == 400
            assert refused.content == alone.content
            assert refused.headers["content-type"] == alone.headers["content-type"]
        got = client.get("/v1/models?x=1")
        assert got.json() == httpx.get(f"{deep.url}/v1/models").json()
        assert client.post("/v1/completions", content=b"{").status_code == 400
        rebound = client.get("/v1/models", headers={"Host": "evil.example"})
        assert rebound.status_code == 403  # the servers' own guard still holds


def test_a_stream_passes_through_piece_by_piece_and_who_leaves_is_cancelled():
    with (
        served(step_s=0.05) as shallow,
        fronted(shallow=Handle(shallow.url), deep=Handle(shallow.url)) as (client, front),
    ):
        body = {"prompt": "w9", "max_tokens": 20, "stream": True, "budget": 0.5}
        stamps = []
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                stamps += [time.monotonic()] if line else []
        assert len(stamps) > 20
        assert stamps[-1] - stamps[0] > 0.5  # it came as it was made
        whole = ask(client, 0.5, max_tokens=20)
        assert whole.json()["usage"]["completion_tokens"] == 20
        with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 200}) as answer:
            assert by(answer) == "shallow"
            lines = answer.iter_lines()  # when it is gone, so is the connection
            assert next(lines).startswith("data: ")
            assert front._places[0].in_flight == 1
        until(lambda: shallow.engine.in_flight == 0 and len(shallow.engine.cancelled) == 1)
        until(lambda: front._places[0].in_flight == 0)


def test_a_server_that_drains_or_is_gone_is_not_missed_and_answers_again_when_it_is_back():
    with (
        served() as shallow,
        served() as deep,
        fronted(shallow=Handle(shallow.url), deep=Handle(deep.url)) as (client, front),
    ):
        place, handle = front._places[0], front._servers["shallow"]
        shallow.engine.drain()
        assert [by(ask(client, 0.5)) for _ in range(3)] == ["deep"] * 3
        until(lambda: not place.is_ready)
        handle.address = "http://127.0.0.1:9"  # nobody is there
        place.url, place.is_ready = handle.address, True
        assert by(ask(client, 0.5)) == "deep"
        assert not place.is_ready
        shallow.engine.state, handle.address = "ready", shallow.url  # as if started elsewhere
        until(lambda: place.is_ready)
        assert by(ask(client, 0.5)) == "shallow"
        deep.engine.drain()
        shallow.engine.drain()
        until(lambda: not any(one.is_ready for one in front._places))
        nobody = ask(client)
        assert nobody.status_code == 503
        assert "retry-after" in nobody.headers
        assert nobody.json()["error"]["type"] == "server_error"


@contextmanager
def failing():
    """A server that answers each request by 500; `ready` is what it says of itself."""
    said = SimpleNamespace(ready=200)

    class Failing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(said.ready, b"")

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(500, b"cannot schedule new futures after shutdown")

        def answer(self, status, content):
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever).start()
    said.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield said
    finally:
        server.shutdown()
        server.server_close()


def test_an_error_passes_through_but_for_one_of_a_server_that_is_ending():
    with (
        failing() as shallow,
        served() as deep,
        fronted(shallow=Handle(shallow.url), deep=Handle(deep.url)) as (client, front),
    ):
        refused = ask(client, 0.5)
        assert (refused.status_code, by(refused)) == (500, "shallow")
        assert refused.text == "cannot schedule new futures after shutdown"
        shallow.ready, front._places[0].is_ready = 503, True  # as if between two looks
        assert by(ask(client, 0.5)) == "deep"
        assert not front._places[0].is_ready
        assert front._places[0].in_flight == 0


def test_a_rolling_restart_waits_for_answers_and_loses_no_request():
    with served(step_s=0.01) as shallow, served(step_s=0.01) as deep:
        seen = []

        def restarting(running):
            async def restart():
                seen.append((running is deep, running.engine.in_flight))

            return restart

        handles = {
            name: Handle(one.url, restarting(one))
            for name, one in (("shallow", shallow), ("deep", deep))
        }
        with fronted(**handles) as (client, front):
            loop = front._watches[0].get_loop()
            with ThreadPoolExecutor(9) as pool:
                asked = [
                    pool.submit(ask, client, (0.5, 1.0)[at % 2], max_tokens=60) for at in range(8)
                ]
                until(lambda: shallow.engine.in_flight == deep.engine.in_flight == 4)
                done = asyncio.run_coroutine_threadsafe(front.restart(), loop)
                assert done.result(20) == ["shallow", "deep"]
                answers = [one.result() for one in asked]
            assert seen == [(False, 0), (True, 0)]  # one after another, with nothing under way
            assert [one.status_code for one in answers] == [200] * 8
            assert {one.json()["usage"]["completion_tokens"] for one in answers} == {60}
            deep.engine.drain()
            until(lambda: not front._places[1].is_ready)
            alone = asyncio.run_coroutine_threadsafe(front.restart(), loop)
            with pytest.raises(RuntimeError, match="shallow is not restarted: no other one"):
                alone.result(20)
