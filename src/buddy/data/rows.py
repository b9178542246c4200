"""Rows of JSON objects, from a JSON or JSON-lines file; an error names the line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buddy.errors import DataError

Row = dict[str, Any]


def read_rows(path: Path, fields: Sequence[str] = ()) -> list[Row]:
    """All rows of a file: JSON lines, or one JSON array.

    Args:
        path: UTF-8.
        fields: That every row must have.

    Raises:
        DataError: The file is missing or empty, or a row is no JSON object or lacks a field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted = f" with the fields {', '.join(fields)}" if fields else ""
        raise DataError(
            f"{path} cannot be read: {error}; expected a file of JSON objects{wanted}"
        ) from error
    rows = _array(path, text) if text.lstrip().startswith("[") else _lines(path, text)
    if not rows:
        raise DataError(f"{path} is empty: expected one JSON object a line")
    for where, row in rows:
        if not isinstance(row, dict):
            raise DataError(f"{path}, {where}, is no JSON object")
        missing = [name for name in fields if name not in row]
        if missing:
            raise DataError(
                f"{path}, {where}, has no field {', '.join(missing)}: expected {', '.join(fields)}"
            )
    return [row for _, row in rows]


def _array(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        return [(f"row {number}", row) for number, row in enumerate(json.loads(text), start=1)]
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error


def _lines(path: Path, text: str) -> list[tuple[str, Any]]:
    rows = []
    # Not splitlines: JSON strings may hold line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except ValueError as error:
            raise DataError(f"{path}, line {number}, is no JSON: {error}") from error
    return rows
