"""Which files of a model's folder may be read: regular ones, by a plain name, that lie inside it.

A link may lead from one place of the folder to another. It may also lead from a snapshot of the
Hugging Face hub's cache, `models--ORG--NAME/snapshots/REVISION`, to `models--ORG--NAME/blobs`,
because that is how the hub keeps every file. All other links that leave the folder are refused.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from buddy.errors import CheckpointError
from buddy.files import read_json


def user_path(name: str | Path) -> Path:
    """A path as a user writes it; `~` of nobody stays as it is."""
    return Path(os.path.expanduser(name))  # Path's own raises where there is no such user


def file_inside(folder: Path, name: str) -> Path:
    """A file of the folder that may be read.

    Args:
        folder: Of a model.
        name: Relative to it, with `/` between parts.

    Raises:
        CheckpointError: The name is none of a file inside, nothing is there, or it is no regular
            file, or a link that leads out.
    """
    if not _is_plain(name):
        raise CheckpointError(
            f"{folder} names the file {name[:200]!r}, which is no plain name of a file inside the "
            "folder: it is not read"
        )
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{path} is missing: fetch or copy the model again") from error
    if not any(real.is_relative_to(root) for root in _roots(folder.resolve())):
        raise CheckpointError(
            f"{path} is a link that leads out of the folder, to {real}: it is not read; copy the "
            "file into the folder"
        )
    if not real.is_file():
        raise CheckpointError(f"{path} is no regular file: fetch or copy the model again")
    return path


def find_inside(folder: Path, name: str) -> Path | None:
    """A file of the folder that may be read, as by `file_inside`; None where there is none."""
    path = folder / name
    return file_inside(folder, name) if path.exists() or path.is_symlink() else None


def read_table(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder.

    Raises:
        CheckpointError: The file may not be read, or holds anything else.
    """
    path = file_inside(folder, name)
    values = read_json(path, CheckpointError)
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, expected an object with keys: fetch or copy "
            "the model again"
        )
    return values


def _is_plain(name: str) -> bool:
    parts = PurePosixPath(name).parts
    plain = name.isprintable() and not set(name) & set("\\:")
    return plain and bool(parts) and ".." not in parts and "/".join(parts) == name


def _roots(folder: Path) -> Iterator[Path]:
    """Where a file of the folder may really lie."""
    yield folder
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and repository.name.startswith("models--"):
            yield snapshot
            yield repository / "blobs"
