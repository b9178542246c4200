"""Makes the decode kernel's library with a C compiler, and tries whether it loads."""

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from buddy.engine.executors.native.instructions import InstructionSet
from buddy.errors import ModelError

COMPILE_LIMIT_S: Final = 120
_SOURCE: Final = "decode.c"
FLAGS: Final = (
    *("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    *("-fassociative-math", "-shared", "-fPIC", "-pthread"),
)
"""Flags of every library; those of its instruction set follow."""
_USUAL: Final = ("cc", "gcc", "clang")
_TRIAL: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).buddy_step"


class CompilerHangsError(ModelError):
    """A compiler, or the trial of what it made, that did not end; not to be tried again."""


def find_compiler() -> tuple[str, ...]:
    """The words that a command to compile begins with: those of CC, or a usual compiler.

    Raises:
        ModelError: There is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise ModelError(f"CC cannot be read as a command: {error}") from error
    for name in named[:1] or _USUAL:
        path = shutil.which(name)
        if path is not None:
            return (path, *named[1:])
    if named:
        raise ModelError(f"no C compiler was found: CC names {named[0]!r}, which is no program")
    raise ModelError("no C compiler was found: install gcc or clang")


def identity(compiler: Sequence[str], instructions: InstructionSet) -> str:
    """A hash of sources, flags, compiler and processor: a library runs where it was made for."""
    digest = hashlib.sha256()
    folder = files(__package__)
    for part in sorted(folder.iterdir(), key=lambda part: part.name):
        if part.name.endswith((".c", ".h")):
            digest.update(part.read_bytes())
    made_for = (*instructions.flags, instructions.machine, *sorted(instructions.needs))
    digest.update("\n".join([*FLAGS, *compiler, *made_for]).encode())
    return f"{instructions.name}-{digest.hexdigest()[:24]}"


def compile_kernel(compiler: Sequence[str], instructions: InstructionSet, folder: Path) -> Path:
    """Make the library in a folder.

    Args:
        compiler: The words that the command begins with.
        instructions: What it may use.
        folder: An empty one.

    Returns:
        The library.

    Raises:
        CompilerHangsError: The compiler does not end.
        ModelError: The compiler fails, or writes nothing.
        OSError: The folder cannot be written.
    """
    library, name = folder / "made.so", shlex.join(compiler)
    source = str(files(__package__) / _SOURCE)
    flags = [*FLAGS, *instructions.flags]
    status, lines = _run([*compiler, *flags, source, "-o", str(library), "-lm"], folder)
    if status != 0:
        raise ModelError(f"{name} could not compile the kernel: {_cause(lines, status)}")
    if not library.is_file():
        raise ModelError(f"{name} reported success and wrote no library")
    return library


def check_loads(library: Path, compiler: Sequence[str]) -> None:
    """Load a library in a process of its own: a broken one can kill a process.

    Args:
        library: In a folder that can be written.
        compiler: Who made it.

    Raises:
        CompilerHangsError: The process does not end.
        ModelError: It cannot be loaded here.
    """
    trial = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    status, lines = _run(trial, library.parent)
    if status != 0:
        raise ModelError(
            f"{shlex.join(compiler)} made a library that this machine cannot load: "
            f"{_cause(lines, status)}"
        )


def _run(command: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command to its end; its exit status and the lines that it wrote."""
    # Into a file: what a compiler that is killed has started could hold a pipe open for ever.
    with (folder / "said").open("w+b") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(COMPILE_LIMIT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CompilerHangsError(
                    f"{shlex.join(command[:1])} did not end in {COMPILE_LIMIT_S} s"
                ) from error
            raise
        output.seek(0)
        return status, output.read().decode(errors="replace").splitlines()


def _cause(lines: list[str], status: int) -> str:
    """Why a command failed, in one line: its first error, else the last that it said."""
    written = [line.strip() for line in lines if line.strip()]
    errors = [line for line in written if "error" in line.lower()]
    if errors or written:
        return (errors or written[-1:])[0]
    return f"signal {-status}" if status < 0 else f"exit status {status}, and it said nothing"
