"""A real server whose memory is short: a prompt too long for it fails alone."""

import itertools
import json
import resource
from pathlib import Path

import httpx
import pytest

from tests.real.test_interrupt import LIMIT_S, start

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="no limit on another process"),
]


@pytest.fixture
def server():
    process = start("serve", "smollm2-135m", "--port", "0")
    lines = itertools.takewhile(lambda line: not line.startswith("keys: "), process.stderr)
    (url,) = [line.split()[1] for line in lines if line.startswith("address: ")]
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        yield process, client
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0


def test_a_prompt_that_memory_is_short_for_fails_alone(server):
    process, client = server
    asked = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    expected = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    status = Path(f"/proc/{process.pid}/status").read_text()
    limit = 1024 * int(status.split("VmSize:")[1].split()[0]) + 1_200_000_000
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
    with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
        events = (line[6:] for line in stream.iter_lines() if line)
        said = [next(events)]
        long = client.post("/v1/completions", json={"prompt": [5] * 1500, "max_tokens": 2})
        assert long.status_code == 500
        assert "not enough memory" in long.json()["error"]["message"]
        said += events
    assert said.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in said) == expected
    assert client.get("/ready").status_code == 200
