"""Opens the decode kernel: a whole library of Buddy's cache folder, else one that is compiled now.

`<home>/native/<identity>-<sha256>.so` is opened only if its bytes have the checksum of its name. A
library that is cut short, empty or damaged is not loaded, which could kill the process, but made
again. That guards against accidents. Who can write the folder can run code as its owner anyway.

Where the cache folder cannot be used, a library is compiled for this process alone.
"""

import ctypes
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from filelock import FileLock

from buddy.engine.executors.native.compiler import (
    COMPILE_LIMIT_S,
    CompilerHangsError,
    compile_kernel,
    find_compiler,
    identity,
)
from buddy.errors import ModelError
from buddy.hub.folder import cache_home, folder_of_one_try


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernel, ready to be called.

    Attributes:
        calls: Its functions.
        compile_s: How long this process compiled it; None if it was in the cache folder.
        why_not_kept: Why it could not be left in the cache folder; None if it is there.
    """

    calls: ctypes.CDLL
    compile_s: float | None
    why_not_kept: str | None = None


def native_library() -> NativeLibrary:
    """The library, compiled if need be.

    Raises:
        ModelError: It cannot be had; the message says why.
    """
    if os.environ.get("BUDDY_NATIVE") == "0":
        raise ModelError("BUDDY_NATIVE=0 is set")
    if sys.platform == "win32":
        raise ModelError("the native kernel is not there for Windows")
    had = _had(find_compiler(), cache_home() / "native")
    if isinstance(had, str):
        raise ModelError(had)
    return had


@cache
def _had(compiler: tuple[str, ...], folder: Path) -> NativeLibrary | str:
    """The library, or why it cannot be had: a compiler that fails is not run for every model."""
    try:
        return _kept_in(folder, compiler)
    except CompilerHangsError as error:
        return str(error)
    # filelock raises NotImplementedError where a file system knows no locks.
    except (ModelError, OSError, NotImplementedError) as error:
        why_not_kept = str(error)
    try:
        with tempfile.TemporaryDirectory(prefix="buddy-") as place:  # what is open may be deleted
            return replace(_kept_in(Path(place), compiler), why_not_kept=why_not_kept)
    except (ModelError, OSError) as error:
        again = str(error)
        return again if again == why_not_kept else f"{why_not_kept}; in a temporary folder: {again}"


def _kept_in(folder: Path, compiler: Sequence[str]) -> NativeLibrary:
    """The library of a folder, put there if it is not."""
    folder.mkdir(parents=True, exist_ok=True)
    key = identity(compiler)
    calls = _find(folder, key)
    if calls is not None:
        return NativeLibrary(calls, None)
    # A process that holds the lock for longer than a compiler may take is stuck.
    with FileLock(folder / f"{key}.lock", timeout=2 * COMPILE_LIMIT_S):
        calls = _find(folder, key)  # another process may have made it meanwhile
        if calls is not None:
            return NativeLibrary(calls, None)
        started_s = time.perf_counter()
        calls = _opened(_make(folder, key, compiler))
        return NativeLibrary(calls, time.perf_counter() - started_s)


def _find(folder: Path, key: str) -> ctypes.CDLL | None:
    """The library with that key whose bytes are those that were written, where it can be opened."""
    for path in folder.glob(f"{key}-*.so"):
        if path.is_file() and path.stem == f"{key}-{_checksum(path)}":
            with suppress(OSError):  # the C library may be an older one now
                return _opened(path)
    return None


def _make(folder: Path, key: str, compiler: Sequence[str]) -> Path:
    """In place of those that cannot be used, by one renaming."""
    for broken in folder.glob(f"{key}-*.so"):
        broken.unlink()
    with folder_of_one_try(folder / f"{key}.staging") as staging:
        made = compile_kernel(compiler, staging)
        path = folder / f"{key}-{_checksum(made)}.so"
        os.replace(made, path)
    return path


def _checksum(path: Path) -> str | None:
    """None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    library.buddy_engine_new.argtypes = [pointer]
    library.buddy_engine_new.restype = pointer
    library.buddy_engine_free.argtypes = [pointer]
    library.buddy_engine_free.restype = None
    library.buddy_has_tiles.argtypes = [pointer]
    library.buddy_has_tiles.restype = ctypes.c_int
    library.buddy_step.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer]
    library.buddy_step.restype = ctypes.c_int
    return library
