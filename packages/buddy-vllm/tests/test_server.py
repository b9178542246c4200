"""The server: what is wrong is 400, what leaves holds nothing, and the engine goes on."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from engines import environment
from exported import NUM_BLOCKS, write_export, write_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")

ARGUMENTS = [
    *("--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", str(2**28)),
    *("--max-model-len", "9000", "--max-num-seqs", "16", "--block-size", "32"),
]


def port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def command(model, *arguments):
    vllm = shutil.which("vllm", path=os.path.dirname(sys.executable)) or "vllm"
    return [sys.executable, vllm, "serve", str(model), *ARGUMENTS, *arguments]


def settings(**changes):
    made = {**environment(), "VLLM_PLUGINS": "buddy", "VLLM_LOGGING_LEVEL": "INFO"}
    made.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
    return {**made, **changes}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    write_export(folder, policy="routed", predictor=True)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    at, log = port(), tmp_path_factory.mktemp("log") / "log"
    arguments = ["--port", str(at), "--host", "127.0.0.1", "--served-model-name", "tiny"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command(model, *arguments), env=settings(), stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + 900
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{at}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < until, log.read_text()[-6000:]
                time.sleep(1)
        yield at, log, process
    finally:
        process.terminate()
        process.wait(60)


def post(at, body, path="/v1/completions"):
    """Status and answer; the body is JSON as it stands where it is text."""
    data = body if isinstance(body, str) else json.dumps(body)
    request = urllib.request.Request(
        f"http://127.0.0.1:{at}{path}", data.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def body(prompt="w5 w9 w33", **changes):
    made = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return {**made, **changes}


def with_budget(written):
    """A request whose budget is this JSON."""
    return json.dumps(body()).removesuffix("}") + f', "vllm_xargs": {{"budget": {written}}}}}'


WRONG = [
    *("0", "-0.5", "1.5", "18", "1e400", "-1e400", "0.01", "NaN", "Infinity", "-Infinity"),
    *('""', '"abc"', '"2 blocks"', '"7 blocks"', '"1e-1"', '"nan"', '"+0.5"', '"0.5 0.6"'),
    *("[]", "[0.5]", "[0.5, 0.6]", '["auto"]', "{}", '{"a": 1}', "[[0.5]]", "[null]", "null"),
    *('"auto!"', '" "', '"\\u0000"', '"\\ud800"', '"99999999999999999999 blocks"', '"0%"'),
    *('"101%"', '"-5%"', '"five blocks"', '"1/2"', '"0x1"', '"\\u0660.\\u0665"', "1e-300"),
    f'"{"9" * 5000}"',
    "9" * 4000,
]
SERVED = ["1", "1.0", "true", '"auto"', '"AUTO"', '"60%"', '"4 blocks"', "0.5", '" 5 blocks "']


def test_a_budget_that_cannot_be_read_or_spent_is_400(server):
    at, _, _ = server
    for written in WRONG:
        status, said = post(at, with_budget(written))
        assert status == 400, (written[:80], status, said[:500])
    status, said = post(at, with_budget('"7 blocks"'))
    assert "expected 3 to 6 blocks" in said
    assert post(at, body())[0] == 200


def test_a_beam_search_has_no_budget(server):
    at, _, _ = server
    beam = {"use_beam_search": True, "n": 2}
    status, said = post(at, body(**beam, vllm_xargs={"budget": 0.5}))
    assert status == 400
    assert "a beam search has no budget" in said
    assert post(at, body(**beam))[0] == 200


def test_a_budget_that_can_is_served_and_the_usage_says_what_ran(server):
    at, _, _ = server
    wanted = {"0.5": 3, '"4 blocks"': 4, '" 5 blocks "': 5, '"60%"': 4, "1": 6}
    for written in SERVED:
        status, said = post(at, with_budget(written))
        assert status == 200, (written, said)
        usage = json.loads(said)["usage"]
        ran = usage["buddy"]
        assert ran["num_blocks"] == NUM_BLOCKS
        assert ran["blocks"] == wanted.get(written, ran["blocks"])
        # The last token is not fed; three tokens are too few to be found in the prefix cache.
        fed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert ran["blocks_executed"] == ran["blocks"] * fed


def test_several_prompts_answers_and_a_stream_say_what_ran(server):
    at, _, _ = server
    both = body(["w5 w9", "w77 w3 w8"], vllm_xargs={"budget": "4 blocks"}, n=2, temperature=1)
    ran = json.loads(post(at, both)[1])["usage"]["buddy"]
    assert ran["blocks"] == 4
    assert ran["blocks_executed"] >= 4 * 4 * 4
    status, said = post(
        at,
        body(
            stream=True, stream_options={"include_usage": True}, vllm_xargs={"budget": "3 blocks"}
        ),
    )
    assert status == 200
    chunks = [line.removeprefix("data: ") for line in said.splitlines() if line]
    assert chunks[-1] == "[DONE]"
    assert json.loads(chunks[-2])["usage"]["buddy"] == {
        "blocks": 3,
        "num_blocks": NUM_BLOCKS,
        "blocks_executed": 3 * 6,
    }


def test_metrics_count_blocks(server):
    at, _, _ = server

    def counted():
        with urllib.request.urlopen(f"http://127.0.0.1:{at}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines
                if line.startswith("buddy_")}  # fmt: skip

    before = counted()
    post(at, body(vllm_xargs={"budget": "5 blocks"}))
    after = counted()
    assert after["buddy_blocks_total"] - before.get("buddy_blocks_total", 0) == 5 * 6
    assert after["buddy_tokens_total"] - before.get("buddy_tokens_total", 0) == 6
    name = 'buddy_requests_total{blocks="5"}'
    assert after[name] - before.get(name, 0) == 1


async def hostile(at, kind, row):
    """One request of some kind: its status, None where the client left first, and its answer."""
    long = [2 + (row * 7 + i) % 500 for i in range(8000)]
    given = {
        "wrong": with_budget(WRONG[row % len(WRONG)]),
        "long": json.dumps(body(long, vllm_xargs={"budget": "3 blocks"})),
        "too long": json.dumps(body(long + long, vllm_xargs={"budget": 0.5})),
        "left": json.dumps(body(stream=True, max_tokens=2000, vllm_xargs={"budget": "auto"})),
        "fine": json.dumps(body(f"w{row + 3} w9", vllm_xargs={"budget": 0.7})),
    }[kind].encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", at)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(given)}\r\n\r\n"
    )
    writer.write(head.encode() + given)
    await writer.drain()
    if kind == "left":
        await asyncio.sleep(0.02 * (row % 20))
        writer.transport.abort()
        return None, ""
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer.decode()[-500:]


def test_a_hundred_hostile_requests_leave_the_engine_alive(server):
    at, _, process = server
    kinds = ["wrong"] * 45 + ["left"] * 20 + ["fine"] * 20 + ["too long"] * 9 + ["long"] * 6
    expected = {"wrong": 400, "left": None, "fine": 200, "too long": 400, "long": 200}

    async def all_at_once():
        order = [(kinds[(37 * row) % 100], row) for row in range(100)]
        done = await asyncio.gather(*(hostile(at, kind, row) for kind, row in order))
        return [(kind, *said) for (kind, _), said in zip(order, done, strict=True)]

    done = asyncio.run(all_at_once())
    assert len(done) == 100
    assert {kind for kind, _, _ in done} == set(expected)
    for kind, status, said in done:
        assert status == expected[kind], (kind, status, said)
    assert process.poll() is None
    assert post(at, body())[0] == 200


@pytest.mark.parametrize(
    ("arguments", "changes", "says"),
    [
        (["--no-enforce-eager"], {}, "set --enforce-eager"),
        # Whatever stands for vLLM's own binary is not come to.
        (
            [],
            {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": sys.executable},
            "unset VLLM_USE_RUST_FRONTEND",
        ),
        (["--enable-lora"], {}, "leave --enable-lora out"),
    ],
    ids=["compiled", "rust", "lora"],
)
def test_what_is_not_served_is_refused_at_start(model, arguments, changes, says):
    done = subprocess.run(
        command(model, "--port", str(port()), *arguments),
        env=settings(**changes),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "buddy-vllm cannot serve this: " in said
    assert says in said
