"""Where models lie on the user's disk: `<home>/models/<name>/`, each complete or absent.

A model is put together in `<home>/staging/<name>/` and renamed into place, under a lock that one
process holds per name.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import platformdirs
from filelock import FileLock, Timeout

from buddy.errors import CheckpointError, ModelError
from buddy.files import read_json
from buddy.hub.progress import OnFetch
from buddy.hub.safe_paths import user_path

SOURCE_FILE: Final = "source.json"
"""Where a model came from and how long its files are."""
SOURCE_FORMAT: Final = 2
KEPT_GGUF: Final = "source.gguf"
"""The GGUF file that a published model was converted from, beside what it became."""
"""Raised when a conversion changes, so that models converted before are not mistaken for new."""
_SAME_FOR_WHEELS: Final = 1
"""Since this one, what published wheels are converted to has not changed."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def cache_home() -> Path:
    """The folder of everything Buddy keeps: `$BUDDY_HOME`, or the user's cache folder."""
    chosen = os.environ.get("BUDDY_HOME")
    if chosen:
        return user_path(chosen).absolute()
    return Path(platformdirs.user_cache_dir("buddy", appauthor=False))


def state_home() -> Path:
    """The folder of what Buddy remembers of its use: `$BUDDY_HOME`, or the user's state folder."""
    if os.environ.get("BUDDY_HOME"):
        return cache_home()
    return Path(platformdirs.user_state_dir("buddy", appauthor=False))


def model_dir(name: str) -> Path:
    """Where the model of that name is, or would be.

    Raises:
        ModelError: The name is not one that a folder of the cache can have.
    """
    if not _NAME.fullmatch(name):
        raise ModelError(
            f"no model can be called {name!r}; expected letters, digits, '.', '_' and '-'"
        )
    return cache_home() / "models" / name


def model_dirs() -> list[Path]:
    """The folder of every model in the cache, by name."""
    models = cache_home() / "models"
    paths = sorted(models.iterdir()) if models.is_dir() else []
    return [path for path in paths if path.is_dir() and _NAME.fullmatch(path.name)]


def is_cached(name: str) -> bool:
    """Whether the model is there, its files having the sizes they were written with.

    Raises:
        CheckpointError: It is there, but damaged.
    """
    folder = model_dir(name)
    if not folder.is_dir():
        return False
    damage = find_damage(folder)
    if damage is not None:
        raise CheckpointError(
            f"the cached model {name} cannot be used: {damage}; "
            f"run `buddy models remove {name}`, then fetch or convert it again"
        )
    return True


@contextmanager
def exclusive(name: str, report: OnFetch) -> Iterator[Path]:
    """Hold the model's lock; give its staging folder, with what a killed process left in it."""
    locks = cache_home() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report("wait", 0, None)
        lock.acquire()
    except NotImplementedError:  # a file system without locks; renames are whole without them
        pass
    staging = staging_dir(name)
    try:
        staging.mkdir(parents=True, exist_ok=True)
        yield staging
    finally:
        with suppress(OSError):  # it holds something for the next try, or is gone already
            staging.rmdir()
        lock.release()


def staging_dir(name: str) -> Path:
    """Where the model of that name is put together."""
    return cache_home() / "staging" / name


@contextmanager
def folder_of_one_try(folder: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards, unless it was renamed or this process killed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(name: str, folder: Path, source: Mapping[str, Any]) -> None:
    """Note where a finished folder came from and how long its files are; rename it into place."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    written = {"format": SOURCE_FORMAT, **source, "files": sizes}
    (folder / SOURCE_FILE).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    target = model_dir(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)


def read_source(folder: Path) -> dict[str, Any]:
    """What a model says of itself; nothing when it says it illegibly."""
    try:
        source = read_json(folder / SOURCE_FILE, CheckpointError)
    except CheckpointError:
        return {}
    return source if isinstance(source, dict) else {}


def find_damage(folder: Path) -> str | None:
    """What is wrong with a model's files, found from their sizes alone."""
    source = read_source(folder)
    if not isinstance(source.get("files"), dict):
        return f"{SOURCE_FILE} is missing or damaged"
    same = (_SAME_FOR_WHEELS, SOURCE_FORMAT) if "wheel" in source else (SOURCE_FORMAT,)
    if source.get("format") not in same:
        return f"expected conversion {SOURCE_FORMAT}, got {source.get('format')}"
    for file_name, num_bytes in source["files"].items():
        file = folder / file_name
        if not file.is_file():
            return f"{file_name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{file_name} has {file.stat().st_size} bytes, expected {num_bytes}"
    return None


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder; 0 when there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
