"""A client with deadlines: the server runs each token as deep as its time allows.

    python examples/deadlines.py [--model MODEL] [--url http://127.0.0.1:8000]

It starts `buddy serve`, unless `--url` names a server that runs. A request's budget may be a time,
`{"ms_per_token": 12}`. A time that no depth can keep is refused, with the one that can be had.
"""

import argparse
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import httpx

PROMPT = "The three most important things in life are"


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """The address of a server that ends with the block."""
    command = [sys.executable, "-m", "buddy", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        for line in server.stderr or ():
            if line.startswith("address: "):
                break
            print(line, end="", file=sys.stderr)
        else:
            raise SystemExit("the server has not started")
        try:
            yield line.split()[1]
        finally:
            server.terminate()


def ask(client: httpx.Client, budget: object) -> str:
    """What an answer under this budget ran and how long its tokens took; or why it was refused."""
    body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "budget": budget}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    arrived, usage = [], {}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            return json.loads(reply.read())["error"]["message"]
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
                arrived.append(time.perf_counter())
    ms = 1000 * (arrived[-1] - arrived[0]) / (usage["completion_tokens"] - 1)
    depth = usage["buddy"]
    return f"{depth['blocks_per_token']:.1f} of {depth['num_blocks']} blocks, {ms:.2f} ms a token"


def main() -> None:
    """Ask without a deadline, and under some that the server says it can or cannot keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--url", help="server that runs; by default one is started")
    options = parser.parse_args()
    with (
        own_server(options.model) if options.url is None else nullcontext(options.url) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        [model] = client.get("/v1/models").json()["data"]
        least = model["buddy"]["least_ms_per_token"]
        print(f"a token takes at least {least:.2f} ms here, with the fewest blocks")
        print(f"{'no deadline':>12}  {ask(client, None)}")
        for share in (2.0, 1.5, 1.1, 0.5):
            deadline = round(share * least, 2)
            said = f"{deadline:9.2f} ms  {ask(client, {'ms_per_token': deadline})}"
            print(textwrap.fill(said, 79, subsequent_indent=" " * 14, drop_whitespace=False))


if __name__ == "__main__":
    main()
