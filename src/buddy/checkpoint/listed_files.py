"""Files of a checkpoint that may be read: those whose size and SHA-256 stand in buddy.json."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from buddy.errors import CheckpointError
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
