"""Rows of JSON objects, from a JSON or JSON-lines file; an error names the line and the field."""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from buddy.errors import DataError, shown
from buddy.files import parse_json, read_bytes

Row = dict[str, Any]
Note = Callable[[str], None]
"""Told, in a sentence, which rows were left out and why."""

MAX_DATA_BYTES: Final = 4 * 2**30
"""A longer file is refused: it is read whole."""
_ARRAY: Final = re.compile(rb"\s*\[")


@dataclass(frozen=True, slots=True)
class FieldCheck:
    """What a field may hold.

    Attributes:
        what: As a message says it.
        fits: Told the value and its row, whose earlier fields fit.
    """

    what: str
    fits: Callable[[Any, Row], bool]


STRING: Final = FieldCheck("a text", lambda value, row: isinstance(value, str))
TEXT: Final = FieldCheck(
    "a text that is not empty", lambda value, row: isinstance(value, str) and bool(value.strip())
)


def read_rows(path: Path) -> list[tuple[str, Row]]:
    """All rows of a file: JSON lines, or one JSON array.

    Args:
        path: UTF-8, with or without a byte order mark.

    Returns:
        Where each row stands, as a message begins, and the row.

    Raises:
        DataError: The file is missing, empty or no regular file, or a row is no JSON object.
    """
    content = read_bytes(path, DataError, most=MAX_DATA_BYTES).removeprefix(BOM_UTF8)
    rows = _array(path, content) if _ARRAY.match(content) else _lines(path, content)
    if not rows:
        raise DataError(f"{path} is empty: expected one JSON object a line")
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object, got {shown(row)}")
    return rows


def _array(path: Path, content: bytes) -> list[tuple[str, Any]]:
    rows = parse_json(content, str(path), DataError)
    return [(f"{path}, row {number},", row) for number, row in enumerate(rows, start=1)]


def _lines(path: Path, content: bytes) -> list[tuple[str, Any]]:
    rows = []
    # Not splitlines: JSON strings may hold line separators of Unicode.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}, line {number},"
            rows.append((where, parse_json(line, where, DataError)))
    return rows


def check_fields(where: str, row: Row, fields: Mapping[str, FieldCheck]) -> Row:
    """These fields of a row, and no others.

    Raises:
        DataError: One is missing, or holds something else.
    """
    missing = [name for name in fields if name not in row]
    if missing:
        raise DataError(f"{where} has no field {', '.join(missing)}: expected {', '.join(fields)}")
    for name, kind in fields.items():
        if not kind.fits(row[name], row):
            raise refused(where, name, kind.what, row[name])
    return {name: row[name] for name in fields}


def refused(where: str, name: str, expected: str, value: object) -> DataError:
    """What is raised for a field that holds something else."""
    return DataError(f"{where} field {name}: expected {expected}, got {shown(value)}")
