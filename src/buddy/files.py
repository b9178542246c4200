"""Reads JSON that anybody may have written, and writes files whole or not at all."""

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any, Final

from buddy.errors import BuddyError, ResultError

MAX_JSON_BYTES: Final = 256 * 2**20
"""Longer JSON is refused: nothing that Buddy reads comes near it."""


def read_json(path: Path, error: type[BuddyError]) -> Any:
    """Read a JSON file.

    Args:
        path: UTF-8, with or without a byte order mark.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`: the file cannot be read, or `parse_json` refuses it.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise error(f"{path} has {size:,} bytes: JSON of at most {MAX_JSON_BYTES:,} is read")
        content = path.read_bytes()
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror or failure}") from failure
    return parse_json(content, str(path), error)


def parse_json(content: bytes | str, where: str, error: type[BuddyError]) -> Any:
    """Parse JSON, and nothing that only looks like it.

    Args:
        content: The JSON. Bytes are UTF-8.
        where: What a message calls it.
        error: What is raised.

    Raises:
        BuddyError: Of the kind `error`: it is no JSON, nests too deeply, or has a number that is
            not finite or a text with half a surrogate pair.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:  # an escape is the only way to half a pair
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as failure:
        raise error(f"{where} has a text with half a surrogate pair, such as \\ud800") from failure
    except RecursionError as failure:
        raise error(f"{where} is no JSON that can be read: it nests too deeply") from failure
    except ValueError as failure:
        raise error(f"{where} is no JSON: {failure}") from failure
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


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
    if _staging(path).exists() or not os.access(path.parent, os.W_OK):
        return f" cannot be written: no file can be made in {path.parent}; name another folder"
    return ""


def _staging(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def check_readable(path: Path, error: type[BuddyError]) -> None:
    """Refuse a file that cannot be read, before the work that it is for.

    Raises:
        BuddyError: Of the kind `error`.
    """
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{path} cannot be read: {reason}") from failure


def write_text(path: Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name in its own folder, then rename it.

    Raises:
        ResultError: It cannot be written; what was there before is intact.
    """
    check_writable(path)
    staging = _staging(path)
    try:
        staging.write_bytes(content)
        os.replace(staging, path)
    except OSError as error:
        raise ResultError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        staging.unlink(missing_ok=True)
