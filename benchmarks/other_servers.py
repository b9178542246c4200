"""Servers of others on the same weights: each a process group, stopped while it is not asked."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
from turns import threads_of

START_S = 900
"""Seconds within which a server must answer: vLLM compiles the model first."""


def vllm_command(python, folder, rows, port):
    """VLLM's server of a folder with weights.

    Args:
        python: Of the environment that has vLLM.
        folder: The weights, in bfloat16.
        rows: Answers at once, at most.
        port: Of this machine.
    """
    return [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"),
        *("--max-num-seqs", str(rows), "--max-num-batched-tokens", "8192"),
        *("--kv-cache-memory-bytes", str(2**30), "--no-enable-prefix-caching"),
        "--disable-log-stats",
    ]


def llama_command(binary, gguf, rows, threads, port):
    """llama.cpp's server of a GGUF file, with as many slots as there may be answers at once."""
    return [
        *(binary, "--model", gguf, "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(rows), "--ctx-size", str(512 * rows), "--threads", str(threads)),
        *("--threads-batch", str(threads), "--no-webui", "--no-warmup", "--jinja"),
    ]


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def started(command, port, threads):
    """A server's process, once it lists its models; ended afterwards with all that it started.

    Args:
        command: What runs it.
        port: Where it listens.
        threads: Cores that it may keep busy.
    """
    environment = {**os.environ, **threads_of(threads), "PYTHONPATH": ""}
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", Path(log.name))
            yield process
        finally:
            _signal(process, signal.SIGCONT)
            _signal(process, signal.SIGKILL)
            process.wait()


def awake(process, among):
    """Let one of some processes run, with all that it started, and stop the others."""
    for other in among:
        _signal(other, signal.SIGCONT if other is process else signal.SIGSTOP)


def _signal(process, which):
    if process.poll() is None:
        os.killpg(process.pid, which)


def _wait(process, url, log):
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/v1/models", trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"a server did not come up: {log.read_text()[-2000:].strip()}")
