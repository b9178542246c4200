"""Compiles the decode kernel once for this machine and opens it.

The sources lie beside this file. The machine's own C compiler makes a library of them when a model
first decodes, and the result is kept in Buddy's cache folder. Where there is no compiler, or where
`BUDDY_NATIVE=0` is set, there is no library, and the general path runs.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import torch

from buddy.engine.executors.native import layout
from buddy.errors import ModelError
from buddy.hub.folder import cache_home

_SOURCES: Final = ("decode.c", "model.h", "matrix.h", "threads.h")
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
_COMPILE_LIMIT_S: Final = 120


@cache
def native_library() -> ctypes.CDLL:
    """The library, compiled if need be.

    Raises:
        ModelError: It cannot be had; the message says why.
    """
    if os.environ.get("BUDDY_NATIVE") == "0":
        raise ModelError("BUDDY_NATIVE=0 is set")
    name = os.environ.get("CC", "cc")
    compiler = shutil.which(name)
    if compiler is None or sys.platform == "win32":
        raise ModelError(f"there is no C compiler ({name})")
    path = cache_home() / "native" / f"{_identity(compiler)}.so"
    try:
        if not path.is_file():
            _compile(compiler, path)
        return _opened(path)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ModelError(f"{compiler} could not compile the kernel: {said[0]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise ModelError(f"the kernel could not be compiled or opened: {error}") from error


@cache
def openmp() -> layout.OpenMP:
    """The OpenMP that torch runs on: two teams of threads would spin on the same cores.

    Raises:
        ModelError: There is none with GNU's calls.
    """
    suffix = {"darwin": "dylib"}.get(sys.platform, "so")
    try:
        # A symbol is looked for in the library and in what it was linked with.
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        calls = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        return layout.OpenMP(*(ctypes.cast(getattr(torch_cpu, c), ctypes.c_void_p) for c in calls))
    except (OSError, AttributeError) as error:
        raise ModelError(f"torch runs on no OpenMP that the kernel can call: {error}") from error


def _identity(compiler: str) -> str:
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
    digest.update("\n".join([*_flags(), compiler, platform.machine(), *features]).encode())
    return digest.hexdigest()[:24]


def _flags() -> list[str]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return [*_FLAGS, *([_WIDE] if is_x86 else [])]


def _compile(compiler: str, path: Path) -> None:
    """Under a temporary name, then renamed: two processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = files(__package__) / _SOURCES[0]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "made.so"
        command = [compiler, *_flags(), str(source), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT_S)
        os.replace(made, path)


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    library.buddy_engine_new.argtypes = [pointer]
    library.buddy_engine_new.restype = pointer
    library.buddy_engine_free.argtypes = [pointer]
    library.buddy_engine_free.restype = None
    library.buddy_step.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer]
    library.buddy_step.restype = ctypes.c_int
    return library
