"""Opens the decode kernel: that of the wheel, else of Buddy's cache folder, else one compiled now.

A wheel's is `shipped/<set>-<sha256>.so` beside this file, a kept one
`<home>/native/<set>-<identity>-<sha256>.so`. A library is opened only if its bytes have the
checksum of its name. One that is cut short, empty or damaged is not loaded, which could kill the
process, but made again. That guards against accidents. Who can write the folder can run code as its
owner anyway.

Where the cache folder cannot be used, a library is compiled for this process alone.
"""

import ctypes
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
    check_loads,
    compile_kernel,
    find_compiler,
    identity,
)
from buddy.engine.executors.native.instructions import InstructionSet, best_set
from buddy.engine.executors.native.kernel_cache import SHIPPED, keep, libraries, whole
from buddy.errors import ModelError
from buddy.hub.folder import cache_home, folder_of_one_try


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernel, ready to be called.

    Attributes:
        calls: Its functions.
        instructions: Name of the set that it was compiled for.
        compile_s: How long this process compiled it; None if it was there.
        why_not_kept: Why it could not be left in the cache folder; None if it is there.
    """

    calls: ctypes.CDLL
    instructions: str
    compile_s: float | None
    why_not_kept: str | None = None


def native_library() -> NativeLibrary:
    """The library of this processor's best instruction set: shipped, kept, or compiled now.

    Raises:
        ModelError: It cannot be had; the message says why.
    """
    if sys.platform == "win32":
        raise ModelError("the native kernel is not there for Windows")
    instructions = best_set()
    shipped = _shipped(SHIPPED, instructions)
    if shipped is not None:
        return shipped
    try:
        compiler = find_compiler()
    except ModelError as error:
        if SHIPPED.is_dir():
            raise ModelError(
                f"the package's own kernel cannot be loaded here, and {error}"
            ) from error
        raise
    library = _kept_or_compiled(compiler, instructions, cache_home() / "native")
    if isinstance(library, str):
        raise ModelError(library)
    return library


@cache
def _shipped(folder: Path, instructions: InstructionSet) -> NativeLibrary | None:
    """What a wheel brought, if it is whole and this system can load it."""
    calls = _find(folder, instructions.name)
    return None if calls is None else NativeLibrary(calls, instructions.name, None)


@cache
def _kept_or_compiled(
    compiler: tuple[str, ...], instructions: InstructionSet, folder: Path
) -> NativeLibrary | str:
    """The library, or why it cannot be had: a compiler that fails is not run for every model."""
    try:
        return _kept_in(folder, compiler, instructions)
    except CompilerHangsError as error:
        return str(error)
    # filelock raises NotImplementedError where a file system knows no locks.
    except (ModelError, OSError, NotImplementedError) as error:
        why_not_kept = str(error)
    try:
        with tempfile.TemporaryDirectory(prefix="buddy-") as place:  # what is open may be deleted
            library = _kept_in(Path(place), compiler, instructions)
            return replace(library, why_not_kept=why_not_kept)
    except (ModelError, OSError) as error:
        again = str(error)
        return again if again == why_not_kept else f"{why_not_kept}; in a temporary folder: {again}"


def _kept_in(folder: Path, compiler: Sequence[str], instructions: InstructionSet) -> NativeLibrary:
    """The library of a folder, put there if it is not."""
    folder.mkdir(parents=True, exist_ok=True)
    key, name = identity(compiler, instructions), instructions.name
    calls = _find(folder, key)
    if calls is not None:
        return NativeLibrary(calls, name, None)
    # A process that holds the lock for longer than a compiler may take is stuck.
    with FileLock(folder / f"{key}.lock", timeout=2 * COMPILE_LIMIT_S):
        calls = _find(folder, key)  # another process may have made it meanwhile
        if calls is not None:
            return NativeLibrary(calls, name, None)
        started_s = time.perf_counter()
        # In place of those that cannot be used, by one renaming.
        for broken in libraries(folder, key):
            broken.unlink()
        with folder_of_one_try(folder / f"{key}.staging") as staging:
            compiled = compile_kernel(compiler, instructions, staging)
            check_loads(compiled, compiler)
            path = keep(compiled, folder, key)
        return NativeLibrary(_opened(path), name, time.perf_counter() - started_s)


def _find(folder: Path, key: str) -> ctypes.CDLL | None:
    """The library with that key whose bytes are those that were written, where it can be opened."""
    for path in whole(folder, key):
        with suppress(OSError):  # the C library may be an older one
            return _opened(path)
    return None


def _opened(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    for name, takes, gives in (
        ("buddy_engine_new", [pointer], pointer),
        ("buddy_engine_free", [pointer], None),
        ("buddy_has_tiles", [pointer], ctypes.c_int),
        ("buddy_step", [pointer, ctypes.c_int, pointer, pointer, pointer], ctypes.c_int),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = takes, gives
    return library
