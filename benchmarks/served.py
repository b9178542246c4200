"""A `buddy serve` of its own process, for benchmarks that ask it."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(model, *options):
    """The address of a server, and its process; it is ended afterwards.

    Args:
        model: As `buddy serve` takes it.
        *options: Further ones of its command line.
    """
    command = [sys.executable, "-m", "buddy", "serve", model, "--port", "0", *map(str, options)]
    with tempfile.NamedTemporaryFile("w") as log:  # a pipe that nobody reads would stop it
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
        try:
            yield _address(process, Path(log.name)), process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _address(process, log):
    while process.poll() is None:
        text = log.read_text()
        if re.search(r"^keys: .*\n", text, re.MULTILINE):  # the last line of its start
            return re.search(r"^address: (http://\S+)$", text, re.MULTILINE)[1]
        time.sleep(0.2)
    sys.exit(f"the server ended before it answered: {log.read_text().strip()}")
