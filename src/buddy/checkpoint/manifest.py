"""buddy.json: what a checkpoint consists of, and which base model it was made for."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final, cast

from buddy.backbone.backbone import Backbone
from buddy.engine.state.cache import KV_POLICIES
from buddy.errors import CheckpointError

MANIFEST: Final = "buddy.json"
FORMAT: Final = 1


def write_manifest(folder: Path, contents: dict[str, Any]) -> None:
    """Write buddy.json over all files that the folder holds."""
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _digest(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, **contents, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read buddy.json and check every file it names, by size and SHA-256.

    Raises:
        CheckpointError: It is damaged, of another format, or a file is missing or changed.
    """
    path = folder / MANIFEST
    try:
        manifest = cast(dict[str, Any], json.loads(path.read_text()))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']!r}, this version reads {FORMAT}: "
                "install the version of Buddy that wrote it"
            )
        recorded = [
            (folder / name, int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        ]
        # Everything that `load` will look up, so that it need not wonder.
        _ = manifest["base"]["source"], manifest["router"], manifest["policy"]
        if manifest["kv_policy"] not in KV_POLICIES:
            raise ValueError(f"unknown kv_policy {manifest['kv_policy']!r}")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy the checkpoint again") from error
    for file, num_bytes, sha256 in recorded:
        _check_file(file, num_bytes, sha256)
    return manifest


def _check_file(file: Path, num_bytes: int, sha256: str) -> None:
    size = file.stat().st_size if file.is_file() else None
    if size != num_bytes:
        found = "is missing" if size is None else f"has {size:,} bytes"
        raise CheckpointError(
            f"{file} {found}, expected {num_bytes:,} bytes: copy the checkpoint again"
        )
    if _digest(file) != sha256:
        raise CheckpointError(f"{file} has been changed or damaged: copy the checkpoint again")


def identity(backbone: Backbone, fingerprint: str | None) -> dict[str, Any]:
    """What makes a base model this one: its sizes, and a fingerprint of its weights."""
    config = backbone.config
    return {
        "model_type": config.model_type,
        "num_blocks": backbone.num_blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "fingerprint": fingerprint,
    }


def check_base(folder: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Refuse a base model that the checkpoint was not made for.

    Raises:
        CheckpointError: It is another one.
    """
    for key, value in found.items():
        if expected.get(key) != value:
            raise CheckpointError(
                f"{folder} was made for another base model: {key} is {expected.get(key)!r} there "
                f"and {value!r} in the model found; load the base model it names"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
