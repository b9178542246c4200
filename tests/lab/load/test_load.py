"""The load generator, against a server on a socket that speaks server-sent events."""

import asyncio
import json
import math
import socket
import threading
from itertools import pairwise
from random import Random

import pytest

from buddy.errors import DataError, ResultError
from buddy.lab.load.load import (
    LoadConfig,
    Outcome,
    parse_budget_weight,
    read_prompts,
    run_load,
    schedule,
    summarise,
)
from buddy.lab.plots.figures import draw
from buddy.records import RunRecord, read_record

TOKENS, GAP_S, FIRST_S = 6, 0.02, 0.03


class Server:
    """A chat endpoint with a fixed pace; every `refuses`-th request is refused.

    No answer begins before as many requests have come as belong `together`.
    """

    def __init__(self, refuses=0, breaks=False, together=0):
        self.refuses, self.breaks, self.seen, self.keys = refuses, breaks, [], []
        self.together, self.are_there = together, asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = b""
        while True:
            part = await receive()
            body += part.get("body", b"")
            if not part.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            await self._json(send, 200, {"data": [{"id": "small"}]})
            return
        asked = json.loads(body)
        self.seen.append(asked)
        self.keys.append(dict(scope["headers"]).get(b"authorization"))
        if self.refuses and len(self.seen) % self.refuses == 0:
            await self._json(send, 429, {"error": {"message": "busy"}}, [(b"retry-after", b"7")])
            return
        if len(self.seen) >= self.together:
            self.are_there.set()
        await asyncio.wait_for(self.are_there.wait(), 60)
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await asyncio.sleep(FIRST_S)
        for place in range(TOKENS):
            if place:
                await asyncio.sleep(GAP_S)
            await self._event(send, {"choices": [{"delta": {"content": f"{place} "}}]})
            if self.breaks and place == 2:
                await self._event(send, {"error": {"message": "the engine failed"}})
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
                return
        depth = 15.0 if asked.get("budget") == 0.5 else 30.0
        usage = {
            "completion_tokens": TOKENS,
            "buddy": {"blocks_per_token": depth, "num_blocks": 30},
        }
        await self._event(send, {"choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _json(self, send, status, value, headers=()):
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})

    async def _event(self, send, value):
        text = f"data: {json.dumps(value)}\n\n".encode()
        await send({"type": "http.response.body", "body": text, "more_body": True})


@pytest.fixture
def serve():
    import uvicorn

    running = []

    def start(app):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        running.append((server, thread, listening))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, thread, listening in running:
        server.should_exit = True
        thread.join()
        listening.close()


def test_each_request_is_timed_and_counted(serve):
    app = Server()
    config = LoadConfig(
        url=serve(app),
        rates=(20.0, 10.0),
        duration_s=1.0,
        budgets=(("0.5", 1.0), ("none", 1.0)),
        max_tokens=TOKENS,
        slo_ttft_ms=5000.0,
        slo_itl_ms=5000.0,
    )
    told = []
    results = run_load(config, ["hello"], on_done=lambda *one: told.append(one))
    requests = results["requests"]
    assert told[-1] == (len(requests), len(requests)) == (len(app.seen),) * 2
    assert results["served_model"] == app.seen[0]["model"] == "small"
    for request in requests:
        assert request["finished"]
        assert request["status"] == 200
        assert request["tokens"] == TOKENS
        assert len(request["itls_ms"]) == TOKENS - 1
        assert request["ttft_ms"] >= 1e3 * FIRST_S * 0.95
        # A busy machine hands several tokens over at once; the last never comes before its time.
        last_ms = request["ttft_ms"] + sum(request["itls_ms"])
        assert last_ms >= 1e3 * (FIRST_S + (TOKENS - 1) * GAP_S) * 0.95
        assert request["blocks_per_token"] == (15.0 if request["budget"] == "0.5" else 30.0)
    asked = [item.get("budget") for item in app.seen]
    assert set(asked) == {0.5, None}
    assert all(item["max_tokens"] == TOKENS and item["ignore_eos"] for item in app.seen)
    first, second = results["points"]
    assert first["offered_rps"] == first["requests"] > second["requests"]
    assert first["goodput_rps"] == first["served_rps"] > 0
    assert first["refused"] == first["failed"] == 0
    mean = sum(15.0 if request == 0.5 else 30.0 for request in asked[: first["requests"]])
    assert first["num_blocks"] == 30
    assert 15.0 < first["blocks_per_token"] < 30.0
    assert first["blocks_per_token"] == pytest.approx(mean / first["requests"], abs=3.0)


def test_requests_do_not_wait_for_one_another(serve):
    """No answer begins before the last request has come: in turn, the first would wait for ever."""
    times = schedule(60.0, 1.0, Random("0 0 60.0"))  # as `run_load` draws them
    config = LoadConfig(url=serve(Server(together=len(times))), rates=(60.0,), duration_s=1.0)
    point = run_load(config, ["hello"])["points"][0]
    assert point["requests"] == len(times) > 40
    assert point["failed"] == point["refused"] == 0


def test_what_is_refused_is_counted_and_not_asked_again(serve):
    app = Server(refuses=3)
    results = run_load(
        LoadConfig(url=serve(app), rates=(25.0,), duration_s=1.0), ["hello"], key="k"
    )
    point = results["points"][0]
    assert len(app.seen) == point["requests"]
    assert point["refused"] == point["requests"] // 3 > 0
    assert point["failed"] == 0
    assert set(app.keys) == {b"Bearer k"}
    assert {request["retry_after_s"] for request in results["requests"]} == {None, 7.0}


def test_an_answer_that_breaks_off_has_failed(serve):
    results = run_load(LoadConfig(url=serve(Server(breaks=True)), rates=(9.0,), duration_s=1.0))
    point = results["points"][0]
    assert point["failed"] == point["requests"] > 0
    assert point["goodput_rps"] == 0
    assert "the engine failed" in results["requests"][0]["error"]


def test_without_a_server_it_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResultError, match="start a server there"):
            run_load(LoadConfig(url=url, rates=(1.0,), duration_s=1.0))


def test_the_same_seed_comes_at_the_same_times_and_as_often_as_it_says():
    times = schedule(50.0, 40.0, Random(3))
    assert times == schedule(50.0, 40.0, Random(3))
    assert times == sorted(times)
    assert abs(len(times) - 2000) < 4 * math.sqrt(2000)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert spread == pytest.approx(mean, rel=0.1)  # of an exponential the two are equal


def test_goodput_counts_answers_within_both_promises():
    config = LoadConfig(
        url="http://x", rates=(1.0,), duration_s=10.0, slo_ttft_ms=100.0, slo_itl_ms=20.0
    )

    def outcome(ttft, gap, **more):
        return Outcome(0.0, "none", 200, True, ttft, [gap] * 4, 3.0, 5, **more)

    good, late, slow = outcome(100.0, 20.0), outcome(101.0, 20.0), outcome(50.0, 21.0)
    cut = Outcome(0.0, "none", 200, False, 50.0, [1.0], 3.0, 2)
    refused = Outcome(0.0, "none", 429, end_s=20.0)
    point = summarise(config, 0.5, [good, late, slow, cut, refused])
    assert point["goodput_rps"] == 1 / 20.0
    assert point["served_rps"] == 3 / 20.0
    assert point["offered_rps"] == 5 / 10.0
    assert (point["refused"], point["failed"]) == (1, 1)
    assert (point["ttft_ms_p50"], point["ttft_ms_p99"]) == (100.0, 101.0)
    assert point["blocks_per_token"] is None


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("0.6", ("0.6", 1.0)),
        ("0.6=2", ("0.6", 2.0)),
        ("18 blocks=0.5", ("18 blocks", 0.5)),
        ('{"ms_per_token": 12}=3', ('{"ms_per_token": 12}', 3.0)),
    ],
)
def test_a_budget_and_its_weight(text, read):
    assert parse_budget_weight(text) == read


@pytest.mark.parametrize("text", ["", "=1", "0.6=", "0.6=0", "0.6=-1", "0.6=x", "{a}=1"])
def test_what_is_no_budget_and_weight_is_refused(text):
    with pytest.raises(ResultError):
        parse_budget_weight(text)


def test_bad_settings_are_refused():
    with pytest.raises(ResultError, match="is like http://127"):
        LoadConfig(url="localhost:8000", rates=(1.0,))
    with pytest.raises(ResultError, match="rate must be"):
        LoadConfig(url="http://x", rates=(1e9,))


def test_prompts_are_lines(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \n")
    assert read_prompts(path) == ["one", "two"]
    path.write_text("\n")
    with pytest.raises(DataError, match="one a line"):
        read_prompts(path)


def test_repeats_are_averaged_and_have_error_bars(tmp_path):
    path = tmp_path / "load.json"
    points = [
        {"rate": 8.0, "offered_rps": offered, "goodput_rps": good, "blocks_per_token": blocks}
        for offered, good, blocks in ((7.0, 6.0, 20.0), (9.0, 8.0, None))
    ]
    points.append({"rate": 4.0, "offered_rps": 4.0, "goodput_rps": 3.5, "blocks_per_token": 30.0})
    results = {"points": points, "requests": []}
    RunRecord(kind="serving-load", model=None, config={"label": "m"}, results=results).save(path)
    goodput, depth = draw("load", [read_record(path)]).axes
    assert goodput.lines[0].get_xydata().tolist() == [[4.0, 3.5], [8.0, 7.0]]
    assert depth.lines[0].get_xydata().tolist() == [[4.0, 30.0], [8.0, 20.0]]
    bars = [segment[:, 1].tolist() for segment in goodput.collections[0].get_segments()]
    assert bars == [[3.5, 3.5], [6.0, 8.0]]


def test_the_record_is_drawn(serve, tmp_path):
    config = LoadConfig(url=serve(Server()), rates=(8.0, 16.0), duration_s=0.5)
    results = run_load(config, ["hello"])
    path = tmp_path / "load.json"
    limits = {"label": "mine", "slo_ttft_ms": 2000.0, "slo_itl_ms": "60.0"}
    RunRecord(kind="serving-load", model=None, config=limits, results=results).save(path)
    figure = draw("load", [read_record(path)])
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert " ".join(said[-1].split()) == "good: 2000 ms to first token, 60 ms a token"
    goodput, depth = figure.axes
    points = results["points"]
    assert list(goodput.lines[0].get_ydata()) == [point["goodput_rps"] for point in points]
    assert list(goodput.lines[0].get_xdata()) == [point["offered_rps"] for point in points]
    assert list(depth.lines[0].get_ydata()) == [30.0, 30.0]
