"""Two processes that a launcher would start side by side, forked as `forked.run` does."""

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.product.cli import forked

_FORK = """
import atexit, json, os, sys
child = os.fork()
if child == 0:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
else:
    @atexit.register
    def end():
        sys.stdout.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        open(os.environ["OTHER"], "w").write(json.dumps(status))
"""


def run_two(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    before: str = "",
) -> tuple[subprocess.CompletedProcess[str], int]:
    """What a command does as two processes of one launch, on CPUs.

    Args:
        arguments: Behind the command's name.
        folder: Where the exit code of the second process is left.
        environment: Variables that are set beside those of this process.
        before: Python that runs in each process before the command; `child` is 0 in the second.

    Returns:
        The first process, with what both have written, and the exit code of the second.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {
        **{"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
        **{"MASTER_PORT": str(port), "OTHER": str(folder / "other.json")},
    }
    done = forked.run(arguments, {**launch, **(environment or {})}, before=f"{_FORK}\n{before}")
    return done, json.loads((folder / "other.json").read_text())


def call_two(function: str, folder: Path, *arguments: str) -> None:
    """Call a function in two processes of one launch, with these texts; both must return.

    Args:
        function: As `module:name`.
        folder: As of `run_two`.
        arguments: Of the function.
    """
    module, _, name = function.partition(":")
    call = f"from {module} import {name}\n{name}(*{arguments!r})\nsys.exit()"
    done, other = run_two([], folder, before=call)
    assert (done.returncode, other) == (0, 0), done.stderr
