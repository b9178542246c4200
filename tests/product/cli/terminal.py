"""A command on a pseudo-terminal: keys are typed, and what it shows is read."""

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.product.cli.forked import start

LONGEST_S = 120.0
"""No command on a terminal takes longer between two lines."""


class Terminal:
    """A command on a pseudo-terminal of its own.

    Attributes:
        shown: All that it has written so far, `\r\n` for each line's end.
        code: Its exit status, once it has ended.
    """

    def __init__(self, master: int) -> None:
        self._master, self._seen = master, 0
        self.shown = ""
        self.code: int | None = None

    def type(self, text: str) -> None:
        """Type keys: `\\x03` is Ctrl-C, `\\x04` Ctrl-D.

        Ctrl-C comes a moment after what was read: Python's readline sees none that comes between
        its echo of a key and its wait for the next one.
        """
        if text == "\x03":
            time.sleep(0.7)
        os.write(self._master, text.encode())

    def wait_for(self, text: str, timeout_s: float = LONGEST_S) -> str:
        """Read until a text comes, and return what came with it since the last one."""
        begun, stops_at = self._seen, time.monotonic() + timeout_s
        while (found := self.shown.find(text, begun)) < 0:
            left = stops_at - time.monotonic()
            assert select.select([self._master], [], [], max(0, left))[0], self.shown
            self.shown += self._read()
        self._seen = found + len(text)
        return self.shown[begun : self._seen]

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode()
        except OSError:  # what Linux says once the command has ended
            raise AssertionError(f"it has ended: {self.shown}") from None


@contextmanager
def terminal(
    arguments: Sequence[str], environment: Mapping[str, str], columns: int = 80
) -> Iterator[Terminal]:
    """What `python -m buddy` does on a terminal; within the block, until it has ended by itself."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    ended = start(arguments, environment, [os.ttyname(slave)] * 3)
    there = Terminal(master)
    try:
        yield there
        assert select.select([ended], [], [], LONGEST_S)[0], f"it goes on: {there.shown}"
    except BaseException:
        os.close(slave)
        os.close(master)  # a hangup: nothing waits for what was typed
        ended.readline()
        raise
    there.code = int(ended.readline())
    while select.select([master], [], [], 0)[0]:
        there.shown += os.read(master, 65536).decode()
    os.close(slave)
    os.close(master)
