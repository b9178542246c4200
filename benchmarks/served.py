"""A `buddy serve` of its own process, for benchmarks that ask it."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def served(model, *options):
    """The address of a server, and its process; it is ended afterwards.

    Args:
        model: As `buddy serve` takes it.
        *options: Further ones of its command line.
    """
    command = [sys.executable, "-m", "buddy", "serve", model, "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield _address(process), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def _address(process):
    found = None
    for line in process.stderr:
        found = re.fullmatch(r"address: (http://\S+)\n", line) or found
        if line.startswith("keys:"):  # the last line of what it says at its start
            return found[1]
    sys.exit("the server ended before it answered: start it by hand to see why")
