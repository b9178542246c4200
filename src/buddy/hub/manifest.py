"""buddy.json as a list of files: what of a Buddy checkpoint is read stands in it, with its SHA-256.

What else it says is read by `checkpoint.manifest`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from buddy.errors import CheckpointError
from buddy.hub.config import CONFIG, GENERATION_CONFIG
from buddy.hub.safe_paths import file_inside, read_table
from buddy.hub.tokenizer import TOKENIZER_FILES
from buddy.hub.weights import INDEX
from buddy.settings import Range, build, check_ranges

MANIFEST: Final = "buddy.json"
FORMAT: Final = 1
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
    """Of its contents, in hexadecimal."""

    def __post_init__(self) -> None:
        check_ranges(self, CheckpointError)


def write_files(folder: Path, contents: dict[str, Any]) -> None:
    """Write buddy.json over all files that the folder holds."""
    manifest = {"format": FORMAT, **contents, "files": describe_files(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


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


def is_checkpoint(folder: Path) -> bool:
    """Whether the folder is a Buddy checkpoint, whole or not."""
    try:
        return (folder / MANIFEST).exists()
    except OSError:  # a name that is too long for a folder's
        return False


def read_files(folder: Path) -> dict[str, Any]:
    """What buddy.json says, as it stands there, once every file has been checked.

    Raises:
        CheckpointError: It is damaged or of another format; or a file is missing or changed, or
            could be read and is not listed.
    """
    values = read_table(folder, MANIFEST)
    listed = _listed(folder, values)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in name.split("/"))
        if name not in listed and name != MANIFEST and not hidden and _could_be_read(path):
            raise CheckpointError(
                f"{path} is not listed in {MANIFEST}, so it was never checked: delete it, or copy "
                "the checkpoint again"
            )
    _check(folder, listed)
    return values


def check_listed(folder: Path, names: Iterable[str]) -> None:
    """Check these files of a checkpoint, and no others.

    Raises:
        CheckpointError: One is not listed, is missing or has changed.
    """
    listed = _listed(folder, read_table(folder, MANIFEST))
    missing = [name for name in names if name not in listed]
    if missing:
        raise CheckpointError(
            f"{folder / missing[0]} is not listed in {MANIFEST}, so it was never checked: delete "
            "it, or copy the checkpoint again"
        )
    _check(folder, {name: listed[name] for name in names})


def base_of(folder: Path) -> str:
    """The base model of a checkpoint: a name or a path, or its own folder `backbone`.

    Raises:
        CheckpointError: buddy.json does not say.
    """
    base = read_table(folder, MANIFEST).get("base")
    source = base.get("source", 0) if isinstance(base, dict) else 0
    if source is None:
        return str(folder / "backbone")
    if not isinstance(source, str) or not source.isprintable() or not source.strip():
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: base.source must name a model or be null, got "
            f"{source!r}: copy the checkpoint again"
        )
    return source


def _listed(folder: Path, values: Mapping[str, Any]) -> dict[str, ListedFile]:
    path = folder / MANIFEST
    if values.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {str(values.get('format'))[:80]}, this version reads {FORMAT}: "
            "install the version of Buddy that wrote it"
        )
    files = values.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} is damaged: it has no files: copy the checkpoint again")
    return {
        name: build(ListedFile, entry, f"{path} is damaged: files: {name}", CheckpointError)
        for name, entry in files.items()
    }


def _could_be_read(path: Path) -> bool:
    kind = path.suffix.lower() in _READ or path.name in _READ_NAMES
    return kind and (path.is_file() or path.is_symlink())


def _check(folder: Path, listed: Mapping[str, ListedFile]) -> None:
    for name, entry in listed.items():
        path = file_inside(folder, name)
        size = path.stat().st_size
        if size != entry.bytes:
            raise CheckpointError(
                f"{path} has {size:,} bytes, expected {entry.bytes:,} bytes: copy the checkpoint "
                "again"
            )
        if _digest(path) != entry.sha256:
            raise CheckpointError(f"{path} has been changed or damaged: copy the checkpoint again")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
