"""Libraries as files: each one's name says which it is and has the checksum of its bytes."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SHIPPED: Final = Path(__file__).parent / "shipped"
"""Where a wheel has its libraries, by instruction set; a checkout has none."""


def keep(library: Path, folder: Path, key: str) -> Path:
    """Move a library to a folder of the same file system; its place there."""
    path = folder / f"{key}-{_checksum(library)}.so"
    os.replace(library, path)
    return path


def whole(folder: Path, key: str) -> Iterator[Path]:
    """The libraries with that key whose bytes are those that were written."""
    for path in libraries(folder, key):
        if path.is_file() and path.stem == f"{key}-{_checksum(path)}":
            yield path


def libraries(folder: Path, key: str) -> Iterator[Path]:
    """All with that key, damaged ones too."""
    return folder.glob(f"{key}-*.so")


def _checksum(path: Path) -> str | None:
    """SHA-256 of a file; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
