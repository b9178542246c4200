"""The recipe for replicas under Ray Serve: two servers of a tiny model behind one address.

The servers are `buddy serve`, and `vllm serve` with the plugin. Neither Ray nor vLLM is a
dependency of Buddy. Name the Python of an environment that has Ray, and the `vllm` of one that has
the plugin:

    python -m venv ray && ray/bin/pip install "ray[serve]"
    .ci/vllm
    BUDDY_RAY_PYTHON=ray/bin/python BUDDY_VLLM=.venv-vllm/bin/vllm \
        python -m pytest tests/deploy/test_ray.py
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import count
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tests.deploy.recipe import FOLDER
from tests.product.serving.made import byte_buddy, byte_tokenizer
from tests.product.serving.serving import until

RAY = os.environ.get("BUDDY_RAY_PYTHON") or (
    sys.executable if importlib.util.find_spec("ray") else None
)
pytestmark = pytest.mark.skipif(
    RAY is None,
    reason='needs Ray: pip install "ray[serve]" in an environment of its own, and name its '
    "Python in BUDDY_RAY_PYTHON",
)
VLLM = os.environ.get("BUDDY_VLLM")
HOST = ("--host", "{host}")
SLOW = 240.0
"""Seconds that Ray, or a server, may take to start on a busy machine."""


def free_ports(number):
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in made]
    for one in made:
        one.close()
    return ports


@pytest.fixture(scope="module", params=["buddy", "vllm"])
def running(request, tmp_path_factory):
    """What was started: the address, the servers' ports, and how to call the recipe's commands."""
    folder = tmp_path_factory.mktemp("replicas")
    num_blocks, command, env = (of_buddy if request.param == "buddy" else of_vllm)(folder)
    front, shallow, deep = free_ports(3)
    lines = [f"num_blocks = {num_blocks}", f"port = {front}", "drain_s = 30.0"]
    lines += ['ready = "/health"'] if request.param == "vllm" else []
    for name, budget, port in (("shallow", 0.6, shallow), ("deep", 1.0, deep)):
        lines += ["[[replica]]", f'name = "{name}"', f"budget = {budget}", f"port = {port}"]
        lines += ["num_cpus = 0.1", f"command = {json.dumps([*command, '--port', '{port}'])}"]
    (folder / "tiny.toml").write_text("\n".join(lines))
    env = {**os.environ, **env, "RAY_USAGE_STATS_ENABLED": "0"}

    def call(*arguments, **more):
        made = [RAY, str(FOLDER / "replicas.py"), *arguments]
        return subprocess.Popen(made, cwd=folder, env=env, stderr=subprocess.STDOUT, **more)

    with (folder / "log").open("w") as log:
        process = call("up", "tiny.toml", stdout=log)
    try:
        url = f"http://127.0.0.1:{front}"

        def is_up():
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            return f"address: {url}\n" in (folder / "log").read_text()

        until(is_up, SLOW)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield SimpleNamespace(
                kind=request.param,
                url=url,
                client=client,
                call=call,
                ports={"shallow": shallow, "deep": deep},
            )
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        assert not any(serving(port) for port in (shallow, deep))
    finally:
        process.kill()
        process.wait()


def of_buddy(folder):
    """Blocks of a tiny model, the command that serves it, and variables of the process."""
    model = byte_buddy("static:2,3,4,1")
    model.save_pretrained(folder / "tiny", include_backbone=True, tokenizer=byte_tokenizer())
    sources = {"PYTHONPATH": str(FOLDER.parent / "src"), "BUDDY_HOME": str(folder / "home")}
    return model.num_blocks, [sys.executable, "-m", "buddy", "serve", "tiny", *HOST], sources


def of_vllm(folder):
    """The same of vLLM with the plugin, whose own tests write the model."""
    if VLLM is None:
        pytest.skip("needs vLLM: make its environment with .ci/vllm, and name its BUDDY_VLLM")
    sys.path.append(str(FOLDER.parent / "packages" / "buddy-vllm" / "tests"))
    from exported import NUM_BLOCKS, write_export, write_tokenizer

    write_export(folder / "tiny")
    write_tokenizer(folder / "tiny")
    command = [VLLM, "serve", "tiny", *HOST, "--enforce-eager", "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(2**26), "--max-model-len", "256"]
    variables = {"VLLM_PLUGINS": "buddy", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return NUM_BLOCKS, command, variables


def serving(port):
    """Processes of the server at a port."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        line = one.info["cmdline"] or []
        if "serve" in line and line[-2:] == ["--port", str(port)]:
            found.append(one)
    return found


def asked(running, budget, **more):
    """A request's body: a budget stands where the server reads it."""
    said = {"budget": budget} if running.kind == "buddy" else {"vllm_xargs": {"budget": budget}}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    return body | said | more


def ask(running, budget, client=None, **more):
    body = asked(running, budget, **more)
    return (client or running.client).post("/v1/completions", json=body)


def by(answer):
    assert answer.status_code == 200, answer.text
    return answer.headers["x-buddy-replica"]


def test_classes_go_to_their_replicas_and_a_bad_budget_is_the_servers_own_400(running):
    blocks = {}
    for budget, name in ((0.5, "shallow"), ("3 blocks", "shallow"), (1.0, "deep"), ("83%", "deep")):
        answer = ask(running, budget)
        assert by(answer) == name
        said = answer.json()["usage"]["buddy"]
        blocks[budget] = said["blocks_per_token" if running.kind == "buddy" else "blocks"]
    assert blocks == {0.5: 3, "3 blocks": 3, 1.0: 6, "83%": 5}
    alone = httpx.Client(base_url=f"http://127.0.0.1:{running.ports['deep']}")
    with alone:
        for wrong in (4, "much", {"mean": 0.5}):
            refused, own = ask(running, wrong), ask(running, wrong, alone)
            assert (refused.status_code, refused.content) == (400, own.content)
        answers = [ask(running, 1.0, one, temperature=0) for one in (running.client, alone)]
    texts = [one.json()["choices"] for one in answers]
    assert texts[0] == texts[1]


def test_a_stream_passes_through_and_a_client_that_leaves_frees_its_server(running):
    body = asked(running, 1.0, max_tokens=100, stream=True)
    pieces = []
    with running.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        pieces += answer.iter_raw()
    assert len(pieces) > 10  # it came as it was made
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    with running.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
    metrics = f"http://127.0.0.1:{running.ports['deep']}/metrics"
    until(lambda: gauge(metrics, "vllm:num_requests_running") == 0.0, 20)


def gauge(url, name):
    rows = [line for line in httpx.get(url).text.splitlines() if line.startswith(name)]
    (row,) = rows
    return float(row.rsplit(" ", 1)[1])


def test_a_rolling_restart_under_load_loses_no_request(running):
    before = {name: serving(port)[0].pid for name, port in running.ports.items()}
    done, ended, numbers = [], threading.Event(), count()

    def load():
        with httpx.Client(base_url=running.url, timeout=60) as client:
            while not ended.is_set():
                number = next(numbers)
                stream = number % 3 == 0
                budget = (0.5, 1.0)[number % 2]
                body = asked(running, budget, max_tokens=60, stream=stream)
                try:
                    answer = client.post("/v1/completions", json=body)
                    whole = (
                        answer.text.endswith("data: [DONE]\n\n")
                        if stream
                        else answer.json()["usage"]["completion_tokens"] == 60
                    )
                    done.append((answer.status_code, whole))
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    done.append((type(error).__name__, False))
                time.sleep(0.05)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for one in threads:
        one.start()
    try:
        restarting = running.call("restart", stdout=subprocess.PIPE, text=True)
        said, _ = restarting.communicate(timeout=2 * SLOW)
    finally:
        ended.set()
        for one in threads:
            one.join()
    assert "restarted: shallow, deep\n" in said
    assert len(done) > 20
    assert set(done) == {(200, True)}
    for name, port in running.ports.items():
        (now,) = serving(port)
        assert now.pid != before[name]


@pytest.mark.parametrize("whom", ["its server", "its actor"])
def test_when_a_replica_is_killed_others_answer_until_it_is_back(running, whom):
    until(lambda: by(ask(running, 0.5)) == "shallow", SLOW)
    (server,) = serving(running.ports["shallow"])
    whole = [server, *server.children(recursive=True)]
    (psutil.Process(server.pid).parent() if whom == "its actor" else server).kill()
    end = time.monotonic() + 3
    while time.monotonic() < end:
        assert by(ask(running, 0.5)) in ("deep", "shallow")
    until(lambda: not any(one.is_running() for one in whole), SLOW)  # nothing stays behind
    until(lambda: by(ask(running, 0.5)) == "shallow", SLOW)
    (again,) = serving(running.ports["shallow"])
    assert again.pid != server.pid
