"""The entry point `main`: runs the command that is typed, and says on one line what went wrong."""

import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import typer
from typer.completion import shell_complete
from typer.main import get_command

from buddy.cli.registry import make_app
from buddy.errors import BuddyError, ResultError, is_failure, is_out_of_memory, one_line
from buddy.processes import says_failures

app = make_app()


_COMPLETE: Final = "_BUDDY_COMPLETE"
"""The variable by which the script of a shell asks for completions."""
_USAGE_ERROR: Final = cast(type[Exception], typer.BadParameter.__base__)
"""Click's error of a command line; typer brings click along or depends on it, by its version."""


class _ToStderr(logging.Handler):
    """Writes to stderr as it is now: a progress bar moves out of the way."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:  # it may be closed
            sys.stderr.write(f"{self.format(record)}\n")  # with what went wrong, where it is told


def main() -> None:
    """Entry point: what goes wrong is one line on stderr.

    The exit code is 2 for what was asked wrongly, 1 for what the machine could not do, 130 after
    Ctrl-C, and 141 where whoever read the output has gone, as of a process that SIGPIPE ended.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with _logged_to_stderr():
        code = _guarded(lambda: _run(sys.argv[1:] or ["--help"]))
    sys.exit(_guarded(lambda: sys.stdout and sys.stdout.flush()) or code)


@contextmanager
def _logged_to_stderr() -> Iterator[None]:
    """Print what the package logs; the program that calls `main` finds its logging as it was."""
    log, handler = logging.getLogger("buddy"), _ToStderr()
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def _run(arguments: Sequence[str]) -> None:
    if sys.stdout is None:
        raise ResultError("stdout is closed: connect it to a terminal, a file, a pipe or /dev/null")
    if not sys.stderr.isatty():  # bars of others are lines there: a few will do
        os.environ.setdefault("TQDM_MININTERVAL", "30")
    command = get_command(app)
    if asked := os.environ.get(_COMPLETE):  # by a shell
        raise typer.Exit(shell_complete(cast(Any, command), {}, "buddy", _COMPLETE, asked))
    with command.make_context("buddy", list(arguments)) as context:
        command.invoke(context)


def _guarded(work: Any) -> int:
    """The exit code of a piece of work, once what went wrong is said."""
    try:
        work()
    except typer.Exit as stop:
        if stop.exit_code:
            says_failures()  # it has said so, and no other process is to
        return int(stop.exit_code)
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        return _say("interrupted", _INTERRUPTED)
    except _USAGE_ERROR as error:
        return _say(_usage(cast(Any, error)), 2)
    except BuddyError as error:
        return _say(str(error), 2)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _say(f"{where}{error.strerror or error}", 1)
    except BaseException as error:
        if is_out_of_memory(error):
            return _say(_NO_MEMORY, 1)
        if isinstance(error, Exception) or not is_failure(error):
            if not says_failures():  # another process of the launch has, and this one missed it
                return 1
            raise
        return _say(f"the tokenizer, or another library, failed at this: {error}", 1)
    return 0


_INTERRUPTED: Final = 130
_NO_MEMORY: Final = (
    "there is not enough memory: take a smaller batch, shorter texts or a smaller model"
)


_PARSED: Final = {"int_parsing": "a whole number", "float_parsing": "a number"}
"""What was expected, by pydantic's name of an error."""


def _usage(error: Any) -> str:
    """What click says of a command line, and where help is."""
    if errors := getattr(error.__cause__, "errors", None):  # pydantic's, by which newer typer reads
        wrong = errors()[0]
        error.message = wrong["msg"].removeprefix("Value error, ")
        if expected := _PARSED.get(wrong["type"]):
            error.message = f"must be {expected}, got {wrong['input']!r:.80}"
    message = error.message if hasattr(error, "possibilities") else error.format_message()
    text = f"{message[:1].lower()}{message[1:]}".rstrip(".")
    if near := getattr(error, "possibilities", None):
        text += f". Did you mean {' or '.join(sorted(near))}?"
    if error.ctx is None:
        return text
    commands = getattr(error.ctx.command, "commands", {})
    if message == "Missing command.":
        text += f": expected one of {', '.join(commands)}"
    return f"{text}; see {error.ctx.command_path} --help"


def _say(text: str, code: int) -> int:
    """Print an error on one line, without what would steer a terminal; there, no word is split.

    Of several processes that were launched together, the first that fails prints it.
    """
    if not says_failures():
        return code
    line = one_line(" ".join(f"buddy: {text}".split()))
    if sys.stderr.isatty():
        line = textwrap.fill(line, os.get_terminal_size(2).columns or 80, break_long_words=False)
        line = f"\n{line}" if code == _INTERRUPTED else line  # after the ^C that is shown
    sys.stderr.write(f"{line}\n")
    return code
