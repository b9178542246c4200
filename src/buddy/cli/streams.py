"""The three standard streams, whatever they are connected to: closed, full, broken, not UTF-8."""

import codecs
import errno
import io
import os
import sys
from typing import Any, Final, TextIO

from buddy.errors import PromptError

_PLAIN: Final = {"█": "#", "·": ".", "±": "+-", "…": "...", "–": "-", "×": "x", "→": "->"}  # noqa: RUF001
"""What stands for our own signs where they cannot be encoded."""

ERRORS: Final = "buddy"
"""The handler of what cannot be encoded: see `_without`."""


class _Output(io.FileIO):
    """A standard output that says what keeps it from being written.

    Attributes:
        is_lost: Nothing more can be written, and nothing more is tried.
    """

    is_lost = False
    is_answer = True
    """Whether it carries what was asked for. The other one carries what is said of it: a full disk
    there is nothing to stop for."""

    def write(self, data: Any) -> int:
        """Write as a file does; what follows a failure is dropped."""
        if not self.is_lost:
            try:
                return super().write(data)
            except OSError as error:
                self.is_lost = True
                if error.errno == errno.EPIPE:
                    raise
                if self.is_answer:
                    raise OSError(
                        error.errno, f"stdout cannot be written whole: {error.strerror}"
                    ) from error
        return len(data)


class _Log(_Output):
    is_answer = False


def open_streams() -> None:
    r"""Make the standard streams of this process fit to be used.

    Descriptors that are closed are taken, so that no file is opened in their place. Text is UTF-8
    on stdin; on the outputs, what the encoding lacks is written as `\xe9`. A closed stdin or
    stdout is None, as Python leaves it; what goes to a closed stderr is lost.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    sys.stderr = _writer(sys.stderr, _Log(2, "w", closefd=False))
    if sys.stdout is not None:
        sys.stdout = _writer(sys.stdout, _Output(1, "w", closefd=False))


def _writer(given: TextIO | None, raw: _Output) -> TextIO:
    encoding = "utf-8" if given is None else given.encoding
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, ERRORS, line_buffering=not raw.is_answer or raw.isatty()
    )


def _without(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end]
    return "".join(_PLAIN.get(sign) or ascii(sign)[1:-1] for sign in signs), error.end


codecs.register_error(ERRORS, _without)


def read_stdin() -> str:
    """All of stdin, but for the newline that ends it.

    Raises:
        PromptError: It is closed, or not UTF-8.
    """
    return _read("read").removesuffix("\n")


def read_line() -> str | None:
    """One line of stdin; None at its end.

    Raises:
        PromptError: It is closed, or not UTF-8.
    """
    return _read("readline") or None


def _read(how: str) -> str:
    if sys.stdin is None:
        raise PromptError("stdin is closed: give the prompt there, or as an argument")
    try:
        return str(getattr(sys.stdin, how)())
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt on stdin is no UTF-8 text: {error}") from error
    except OSError as error:
        raise PromptError(f"stdin cannot be read: {error.strerror or error}") from error
