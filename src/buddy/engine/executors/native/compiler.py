"""Makes the decode kernel's library with the machine's C compiler, and tries whether it loads."""

import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from buddy.errors import ModelError

COMPILE_LIMIT_S: Final = 120
_SOURCES: Final = ("decode.c", "model.h", "multiply.h", "matrix.h", "tiles.h", "threads.h")
_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
_WIDE: Final = "-mprefer-vector-width=512"
"""GCC and Clang on x86; elsewhere unknown."""
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


def identity(compiler: Sequence[str]) -> str:
    """Of sources, flags, compiler and processor: a library runs only where it was made."""
    digest = hashlib.sha256()
    folder = files(__package__)
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    cpuinfo = Path("/proc/cpuinfo")
    features = [
        line
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ())
        if line.startswith(("flags", "Features"))
    ][:1]
    digest.update("\n".join([*_flags(), *compiler, platform.machine(), *features]).encode())
    return digest.hexdigest()[:24]


def compile_kernel(compiler: Sequence[str], folder: Path) -> Path:
    """Make the library in a folder, and load it in a process of its own.

    Args:
        compiler: The words that the command begins with.
        folder: An empty one.

    Returns:
        The library, which this machine can load.

    Raises:
        CompilerHangsError: The compiler does not end.
        ModelError: The compiler fails, writes nothing, or makes what cannot be loaded.
        OSError: The folder cannot be written.
    """
    made, name = folder / "made.so", shlex.join(compiler)
    source = str(files(__package__) / _SOURCES[0])
    status, said = _run([*compiler, *_flags(), source, "-o", str(made), "-lm"], folder)
    if status != 0:
        raise ModelError(f"{name} could not compile the kernel: {_cause(said, status)}")
    if not made.is_file():
        raise ModelError(f"{name} reported success and wrote no library")
    # Loading a broken library can kill a process, so it is not this one that tries.
    status, said = _run([sys.executable, "-I", "-S", "-c", _TRIAL, str(made)], folder)
    if status != 0:
        raise ModelError(
            f"{name} made a library that this machine cannot load: {_cause(said, status)}"
        )
    return made


def _flags() -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return [*_FLAGS, *([_WIDE] if is_x86 else [])]


def _run(command: list[str], folder: Path) -> tuple[int, list[str]]:
    """Run a command to its end; its exit status and the lines that it wrote."""
    # Into a file: what a compiler that is killed has started could hold a pipe open for ever.
    with (folder / "said").open("w+b") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
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
        said.seek(0)
        return status, said.read().decode(errors="replace").splitlines()


def _cause(said: list[str], status: int) -> str:
    """Why a command failed, in one line: its first error, else the last that it said."""
    written = [line.strip() for line in said if line.strip()]
    errors = [line for line in written if "error" in line.lower()]
    if errors or written:
        return (errors or written[-1:])[0]
    return f"signal {-status}" if status < 0 else f"exit status {status}, and it said nothing"
