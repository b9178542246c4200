"""Lines that a person types: edited by readline, kept for later sessions, and safe from Ctrl-C."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from buddy.cli.streams import read_line
from buddy.errors import PromptError

if TYPE_CHECKING:
    from rich.console import Console

_MOST_LINES: Final = 1000
"""Lines of the history that are kept."""


def typed_lines(console: "Console", history: Path | None) -> Iterator[str]:
    """Yield each line that says something, without space around it.

    On a terminal, Ctrl-C forgets the line that is being typed; Ctrl-D, or Ctrl-C twice at an empty
    prompt, ends. Elsewhere the end of the input ends, and Ctrl-C is what it is for any command.

    Args:
        console: Where the person is told of that.
        history: File that lines are read from and appended to; None keeps none.

    Raises:
        PromptError: Stdin is no terminal, and cannot be read or is no UTF-8 text.
    """
    if not sys.stdin.isatty():
        while (line := read_line()) is not None:
            if line.strip():
                yield line.strip()
        return
    editor, leaves = _Editor(console, history), False
    while True:
        try:
            line = editor.read()
        except KeyboardInterrupt:
            is_empty = not editor.typed.strip()
            console.print()
            if is_empty and leaves:
                return
            if is_empty:
                console.print("Ctrl-C again, or Ctrl-D, ends the conversation", style="dim")
            leaves = is_empty
            continue
        except PromptError as error:
            console.print(str(error), style="red")
            continue
        if line is None:
            console.print()
            return
        leaves = False
        if line.strip():
            yield line.strip()


class _Editor:
    """Reads lines from a terminal, by readline where Python has it and stdout is a terminal too."""

    def __init__(self, console: "Console", history: Path | None) -> None:
        self._console, self._history = console, history
        self._readline = _readline()
        if self._readline is None:
            return
        self._readline.set_history_length(_MOST_LINES)
        if history is not None:
            try:
                _make_private(history)
                self._readline.read_history_file(history)
            except OSError as error:
                self._keep_none(error)

    @property
    def typed(self) -> str:
        """What stands on the line that was interrupted; nothing where only the terminal knows."""
        return "" if self._readline is None else str(self._readline.get_line_buffer())

    def read(self) -> str | None:
        """The next line; None after Ctrl-D.

        Raises:
            PromptError: It is no UTF-8 text.
        """
        sys.stderr.write("\n" if self._readline else "\n> ")
        sys.stderr.flush()
        if self._readline is None:
            return read_line()
        before = self._readline.get_current_history_length()
        try:
            line = input("> ")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"the line is no UTF-8 text: {error}") from error
        if self._history is not None and self._readline.get_current_history_length() > before:
            try:
                self._readline.append_history_file(1, self._history)
            except OSError as error:
                self._keep_none(error)
        return line

    def _keep_none(self, error: OSError) -> None:
        self._console.print(f"lines are not kept in {self._history}: {error.strerror}", style="dim")
        self._history = None


def _readline() -> ModuleType | None:
    """The module readline; None where there is none, or its prompt would go to a file."""
    if not sys.stdout.isatty():
        return None
    try:
        import readline
    except ImportError:
        return None
    return readline if hasattr(readline, "append_history_file") else None


def _make_private(file: Path) -> None:
    """Have the file there, for its owner's eyes alone."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
