"""Reads JSON that anybody may have written, and writes files whole or not at all."""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from buddy.errors import BuddyError, ResultError, shown

if TYPE_CHECKING:
    from filelock import FileLock

_log = logging.getLogger(__name__)

MAX_JSON_BYTES: Final = 256 * 2**20
"""Longer JSON is refused: nothing that Buddy reads comes near it."""
_NEW, _OLD = "new", "old"
_NAME_LENGTH: Final = 60
_SETTLED_S: Final = 60.0
"""A staging folder that is younger may not be locked yet by who writes in it."""
_OF_RUST: Final = re.compile(r"\(os error (\d+)\)")
"""How Rust's libraries end what the system has told them."""


def read_json(path: Path, error: type[BuddyError]) -> Any:
    """Read a JSON file.

    Args:
        path: UTF-8, with or without a byte order mark.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`: the file cannot be read, or `parse_json` refuses it.
    """
    return parse_json(read_bytes(path, error, most=MAX_JSON_BYTES), str(path), error)


def read_bytes(path: Path, error: type[BuddyError], *, most: int) -> bytes:
    """Read a regular file whole; a pipe or a device might never end.

    Args:
        path: A leading `~` is the user's home.
        error: What is raised.
        most: Bytes.

    Raises:
        BuddyError: Of the kind `error`: `check_readable` refuses it, it cannot be read, or it is
            longer.
    """
    size = check_readable(path, error)
    if size > most:
        raise error(f"{path} has {size:,} bytes: at most {most:,} are read")
    try:
        return path.expanduser().read_bytes()
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure


def read_text(path: Path, error: type[BuddyError], *, most: int) -> str:
    """Read a regular file whole, as `read_bytes` does; UTF-8, with or without a byte order mark."""
    try:
        return read_bytes(path, error, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise error(f"{path} is no UTF-8 text: {failure}") from failure


def check_readable(path: Path, error: type[BuddyError]) -> int:
    """Refuse what is no regular file that may be read; its size in bytes.

    Raises:
        BuddyError: Of the kind `error`.
    """
    try:
        status = path.expanduser().stat()
        may_read = os.access(path.expanduser(), os.R_OK)
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure
    except (ValueError, RuntimeError) as failure:  # a NUL in the name; a user without a home
        raise error(f"{shown(str(path))} cannot be read: {failure}") from failure
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} cannot be read: expected a regular file, and it is none")
    if not may_read:
        raise error(f"{path} cannot be read: permission denied")
    return status.st_size


def parse_json(content: bytes | str, where: str, error: type[BuddyError]) -> Any:
    """Parse JSON, and nothing that only looks like it.

    Args:
        content: The JSON. Bytes are UTF-8.
        where: What a message calls it.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`: it is no JSON, nests too deeply, names a key twice, or has
            a number that is not finite or a text with half a surrogate pair.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(
            text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_object
        )
        if "\\u" in text:  # an escape is the only way to half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as failure:
        raise error(f"{where} has a text with half a surrogate pair, such as \\ud800") from failure
    except RecursionError as failure:
        raise error(f"{where} is no JSON that can be read: it nests too deeply") from failure
    except ValueError as failure:
        raise error(f"{where} is no JSON: {failure}") from failure
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"an object has the key {shown(key)} twice")
        values[key] = value
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def plain_name(text: str) -> str:
    """A file's name for any text: plain letters as they are, else with a mark of its own."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", text)[:_NAME_LENGTH]
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return plain if plain == text else f"{plain}-{mark}"


def check_writable(path: Path) -> None:
    """Refuse a place where no file can be written, before the work that it is for.

    Raises:
        ResultError: There is no such folder, or none that may be written; or something there that
            is no file.
    """
    try:
        obstacle = _obstacle(path)
    except (OSError, ValueError) as error:  # no name for a file, such as one that is too long
        obstacle = f" cannot be written: {getattr(error, 'strerror', None) or error}; name another"
    if obstacle:
        raise ResultError(f"{path}{obstacle}")


def _obstacle(path: Path) -> str:
    if not path.parent.is_dir():
        return f": there is no folder {path.parent}; make it first"
    if path.exists() and not path.is_file():
        return " is no regular file: name another"
    if _staging_name(path).exists() or not os.access(path.parent, os.W_OK):
        return f" cannot be written: no file can be made in {path.parent}; name another folder"
    return ""


def _staging_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


@contextmanager
def _staging(path: Path) -> Iterator[Path]:
    """A folder beside `path` to write in, gone afterwards; with it goes what a kill left there.

    Its lock falls with the process that writes in it, however that ends.
    """
    for left in path.parent.glob(f".{escape(path.name)}.{'[0-9a-f]' * 32}"):
        with suppress(OSError):
            _clear(left, path)
    folder = _staging_name(path)
    folder.mkdir()
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the folder is locked for this block alone; some file systems know no locks."""
    number = os.open(folder, os.O_RDONLY | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(number)


@contextmanager
def alone(
    path: Path, lock: "FileLock | None" = None, error: type[BuddyError] = ResultError
) -> Iterator[None]:
    """Keep other runs from writing to a file or a folder; the lock falls with the process.

    Args:
        path: Written to in the block.
        lock: What is held; by default a file beside `path`, which goes afterwards.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`: another run holds it, or the lock cannot be made.
    """
    from filelock import FileLock, Timeout

    beside = path.with_name(f".{path.name}.lock") if lock is None else None
    lock = lock or FileLock(cast(Path, beside))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise error(
            f"another run is writing to {path}: wait until it ends, or name another --out"
        ) from None
    except NotImplementedError:
        _log.warning("%s is on a file system without locks: a second run is not kept out", path)
    except OSError as failure:
        why = failure.strerror or failure
        raise error(f"{path} cannot be locked: {why}; name another --out") from failure
    try:
        yield
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)
        lock.release()


def _clear(left: Path, path: Path) -> None:
    """Delete a staging folder of `path` whose writer was killed; first move back what it moved."""
    if time.time() - left.lstat().st_mtime < _SETTLED_S:
        return
    with _locked(left) as is_dead:
        if is_dead and (left / _OLD).exists() and not path.exists():
            os.replace(left / _OLD, path)
        if is_dead and left.is_dir():
            shutil.rmtree(left)
        elif is_dead:  # a file, as earlier versions wrote
            left.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which takes the place of `path` when the block ends well.

    Raises:
        OSError: It cannot be written or renamed; what was there before is intact.
    """
    with _staging(path) as staging, system_errors():
        yield staging / _NEW
        os.replace(staging / _NEW, path)


def write_text(path: Path, text: str) -> None:
    """Write a file as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file beside its place, then rename it.

    Raises:
        ResultError: It cannot be written; what was there before is intact.
    """
    check_writable(path)
    try:
        with replacing(path) as new:
            new.write_bytes(content)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise an OSError where a library of Rust's says in an error of its own what the system said.

    So do safetensors and tokenizers where a disk is full.

    Raises:
        OSError: The system refused something in the block.
    """
    try:
        yield
    except (OSError, BuddyError):
        raise
    except Exception as error:
        number = _OF_RUST.search(str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes its place when the block ends without an error.

    What was there before stays until the new one is there. Weights get the mode of other files:
    safetensors writes for the owner alone.

    Args:
        folder: Where it goes; its parents are made.

    Raises:
        OSError: It cannot be made, written or renamed; what was there before is intact.
    """
    # A link stays, and what it leads to is replaced; "." has no name that could be taken.
    folder = Path(os.path.realpath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _staging(folder) as staging:
        new = staging / _NEW
        new.mkdir()
        with system_errors():
            yield new
        for path in new.rglob("*.safetensors"):
            path.chmod(new.stat().st_mode & 0o666)
        _swap(new, folder)


def _swap(new: Path, folder: Path) -> None:
    if not folder.exists():
        os.replace(new, folder)
        return
    old = new.with_name(_OLD)
    try:
        os.replace(folder, old)
        os.replace(new, folder)
    except BaseException:  # such as Ctrl-C
        if old.exists() and not folder.exists():
            os.replace(old, folder)
        raise
