"""Notes of what this machine found out about a model: `<home>/noted/<name>.json`.

A name is of all that the note depends on. A note that is damaged, or that cannot be written, costs
finding out again and nothing else.
"""

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from buddy import __version__
from buddy.errors import CheckpointError, ResultError
from buddy.files import read_json, write_text
from buddy.hub.folder import cache_home

_FORMAT: Final = 2


def note_name(*parts: object) -> str:
    """The name of a note that depends on these parts, and on the versions that read a model."""
    versions = (_FORMAT, __version__, version("transformers"))
    return hashlib.sha256("\n".join(map(str, (*versions, *parts))).encode()).hexdigest()


def read_note(name: str) -> dict[str, Any]:
    """What was noted under a name; empty where nothing was, or it is not as it was written."""
    try:
        noted = read_json(_path(name), CheckpointError)
        content: dict[str, Any] = noted["content"]
        return content if noted["digest"] == _digest(content) else {}
    except (CheckpointError, KeyError, TypeError):
        return {}


def write_note(name: str, content: dict[str, Any]) -> None:
    """Note something under a name, if the cache can be written."""
    path = _path(name)
    with suppress(OSError, ResultError):
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = {"content": content, "digest": _digest(content)}
        write_text(path, json.dumps(noted) + "\n")


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _path(name: str) -> Path:
    return cache_home() / "noted" / f"{name}.json"
