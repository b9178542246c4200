"""Commands as processes of their own, forked from one that has imported what they need.

Importing it takes seconds, and most of what a test of the command line pays for. The child sets
the environment, the folder and the streams as a new process would have them, and runs
`python -m buddy`.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

READ_AT_IMPORT = (
    *("HF_", "TRANSFORMERS_", "OMP_", "MKL_", "TORCH", "PYTHON", "LD_", "CUDA_", "TQDM_"),
)
"""Starts of variables that libraries read when they are imported: a fork would come too late, so
each set of them has a process of its own, which takes seconds to start."""

IMPORTED = (
    *("torch", "transformers.models.llama.modeling_llama", "tokenizers", "rich.table"),
    *("buddy.model", "buddy.cli.main", "buddy.cli.commands.generate", "buddy.cli.commands.info"),
)
"""What most commands import."""


@functools.cache
def hub_home() -> Path:
    """What is `HF_HOME` to all commands: a hub's cache that is empty and of these tests alone."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    *,
    most_bytes: int | None = None,
    killed_at: Path | None = None,
    is_strict: bool = False,
    before: str = "",
) -> subprocess.CompletedProcess[str]:
    """What `python -m buddy` does with these arguments, where no hub can be reached.

    Args:
        arguments: Behind the command's name.
        environment: Variables that are set beside those of this process.
        stdin: What it may read; nothing by default.
        most_bytes: Of a file that it may write: what a full disk looks like to the writer.
        killed_at: The process is killed once there is this file, before it opens another.
        is_strict: A `UserWarning` is an error.
        before: Python that runs in the process before the command.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stdin").write_text(stdin or "")
        streams = [str(folder / stream) for stream in ("stdin", "stdout", "stderr")]
        killed = None if killed_at is None else str(killed_at)
        ended = start(
            arguments,
            environment,
            streams,
            most_bytes=most_bytes,
            killed_at=killed,
            is_strict=is_strict,
            before=before,
        )
        code = int(ended.readline())
        out, err = ((folder / stream).read_bytes().decode() for stream in ("stdout", "stderr"))
    assert is_plain(out + err), f"what is piped is not plain: {out + err}"
    return subprocess.CompletedProcess(["buddy", *arguments], code, out, err)


def is_plain(text: str) -> bool:
    """Whether a text has no box, no colour and nothing else that steers a terminal."""
    return not re.search(r"[\x1b\r\b\u2500-\u257f]", text)


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
    streams: list[str],
    *,
    most_bytes: int | None = None,
    killed_at: str | None = None,
    is_strict: bool = False,
    before: str = "",
) -> IO[str]:
    """Have a command begin, as `run` does; what is returned gives its exit status as a line.

    Args:
        arguments: As of `run`.
        environment: The same.
        streams: Files, or one terminal: stdin, stdout and stderr.
        most_bytes: As of `run`.
        killed_at: The same.
        is_strict: The same.
        before: The same.
    """
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(hub_home())}
    environment = {**os.environ, **hub, **(environment or {})}
    early = {key: value for key, value in environment.items() if key.startswith(READ_AT_IMPORT)}
    server = _server(tuple(sorted(early.items())))
    request = {
        "arguments": list(arguments),
        "environment": environment,
        "cwd": os.getcwd(),
        "most_bytes": most_bytes,
        "killed_at": killed_at,
        "is_strict": is_strict,
        "before": before,
        "streams": streams,
    }
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return server.stdout


@functools.cache
def _server(early: tuple[tuple[str, str], ...]) -> "subprocess.Popen[str]":
    rest = {key: value for key, value in os.environ.items() if not key.startswith(READ_AT_IMPORT)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.product.cli.forked"], env={**rest, **dict(early)}, **pipes
    )
    atexit.register(server.kill)
    return server


def _serve() -> None:
    """Fork for each request on stdin, and answer with the exit status."""
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # else each child looks through all of it, and more than once as it ends
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _become(request: dict[str, Any]) -> NoReturn:
    """End as the command ends; never returns."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if request["most_bytes"] is not None:
        sys.dont_write_bytecode = True  # compiled modules would be cut short as well, and stay so
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["most_bytes"],) * 2)
    if request["killed_at"] is not None:
        _die_once_there_is(request["killed_at"])
    if request["is_strict"]:
        warnings.simplefilter("error", UserWarning)
    os.setsid()  # a terminal that is opened now is this command's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writes = os.O_WRONLY | os.O_CREAT
    for place, (path, mode) in enumerate(
        zip(request["streams"], (os.O_RDONLY, writes, writes), strict=True)
    ):
        opened = os.open(path, mode, 0o600)
        os.dup2(opened, place)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["buddy", *request["arguments"]]
    exec(request["before"], {})
    runpy.run_module("buddy", run_name="__main__", alter_sys=True)
    sys.exit(0)


def _die_once_there_is(path: str) -> None:
    """Look for the file at each of Python's audit events, of which opening a file is one."""

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "os.kill" and os.path.exists(path):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


if __name__ == "__main__":
    _serve()
