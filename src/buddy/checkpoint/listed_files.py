"""Files of a checkpoint that may be read: those whose size and SHA-256 stand in buddy.json."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from buddy.errors import CheckpointError, shown
from buddy.files import read_json
from buddy.hub.config import CONFIG, GENERATION_CONFIG
from buddy.hub.safe_paths import file_inside
from buddy.hub.tokenizer import TOKENIZER_FILES
from buddy.hub.weights import INDEX
from buddy.settings import Range, check_ranges

MANIFEST: Final = "buddy.json"
_READ: Final = frozenset(
    {
        *(".safetensors", ".gguf", ".model", ".jinja"),
        *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".h5", ".msgpack"),
        *(".py", ".so", ".pyc"),
    }
)
"""Files of these kinds could be read as weights, as a tokenizer, as a template or as code."""
_READ_NAMES: Final = frozenset(
    {CONFIG, GENERATION_CONFIG, "adapter_config.json", INDEX, *TOKENIZER_FILES}
)
"""Files of these names could be read as what their names say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFile:
    """What a file of a checkpoint must be."""

    bytes: Annotated[int, Range(0)]
    """Its size."""
    sha256: str
    """Digest of its contents, in hexadecimal."""

    def __post_init__(self) -> None:
        check_ranges(self, CheckpointError)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of all files that the folder holds, by name."""
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_replaceable(folder: Path, manifest: str, kind: str) -> None:
    """Refuse to write over a folder with a file in it that no earlier writing put there.

    Args:
        folder: It may be missing or empty.
        manifest: Name of the file whose `files` are what was written.
        kind: What is written, as a message names it.

    Raises:
        CheckpointError: It holds something else.
        OSError: It cannot be read.
    """
    if not folder.exists():
        return
    held = {path.relative_to(folder).as_posix() for path in _leaves(folder)}
    if not held and folder.is_dir():
        return
    if manifest not in held:
        raise CheckpointError(f"{folder} holds what is no {kind}: name a new or an empty folder")
    described = read_json(folder / manifest, CheckpointError)
    listed = described.get("files") if isinstance(described, dict) else None
    others = sorted(held - {manifest} - set(listed if isinstance(listed, dict) else ()))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise CheckpointError(
            f"{folder} holds {shown(others[0])}{more} beside a {kind}, which would be deleted: "
            "move what you need elsewhere, or name a new folder"
        )


def _leaves(folder: Path) -> Iterator[Path]:
    """What a folder holds but for folders, wherever in it."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            yield path


def check_files(folder: Path, listed: Mapping[str, ListedFile]) -> None:
    """Check every file of a checkpoint.

    Raises:
        CheckpointError: One is missing or has changed, or could be read and is not listed.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in name.split("/"))
        if name not in listed and name != MANIFEST and not hidden and _could_be_read(path):
            raise _unlisted(path)
    for name in listed:
        check_file(folder, name, listed)


def check_file(folder: Path, name: str, listed: Mapping[str, ListedFile]) -> None:
    """Check one file of a checkpoint.

    Raises:
        CheckpointError: It is not listed, is missing or has changed.
    """
    if name not in listed:
        raise _unlisted(folder / name)
    path, expected = file_inside(folder, name), listed[name]
    size = path.stat().st_size
    if size != expected.bytes:
        raise CheckpointError(
            f"{path} has {size:,} bytes, expected {expected.bytes:,} bytes: copy the checkpoint "
            "again"
        )
    if _digest(path) != expected.sha256:
        raise CheckpointError(f"{path} has been changed or damaged: copy the checkpoint again")


def _unlisted(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is not listed in {MANIFEST}, so it was never checked: delete it, or copy the "
        "checkpoint again"
    )


def _could_be_read(path: Path) -> bool:
    kind = path.suffix.lower() in _READ or path.name in _READ_NAMES
    return kind and (path.is_file() or path.is_symlink())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
