"""Verifies each model once: `<home>/verified/<key>.json` says which ones are known to be right.

The key is of all that the answer depends on. A file that is damaged, or that cannot be written,
costs another verification and nothing else.
"""

import hashlib
import json
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from buddy import __version__
from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.memory import Release, keep, released_when_run
from buddy.backbone.verify import verify_backbone
from buddy.errors import CheckpointError, ResultError
from buddy.files import read_json, write_text
from buddy.hub.folder import cache_home

_FORMAT: Final = 1
"""Raised when Backbone or the comparison changes, so that everything is verified again."""


def verify_once(model: Any, release: Release = keep) -> None:
    """Verify a model that was just loaded, unless this one was verified before.

    Args:
        model: A Hugging Face causal LM of a supported family, in evaluation mode.
        release: Told of each weight that was looked at.

    Raises:
        FamilyError: Buddy would not compute it as transformers does.
    """
    backbone = Backbone(model)
    fingerprint = base_fingerprint(model, release)
    if is_verified(backbone, fingerprint):
        return
    with released_when_run(backbone.blocks, release):
        verify_backbone(backbone)
    for weight in model.parameters():
        release(weight)
    key = _key(backbone, fingerprint)
    _note(_path(key), {"key": key, "model_type": backbone.config.model_type})


def is_verified(backbone: Backbone, fingerprint: str) -> bool:
    """Whether a model with this fingerprint of its weights is known to be right."""
    key = _key(backbone, fingerprint)
    return _says(_path(key), key)


def _key(backbone: Backbone, fingerprint: str) -> str:
    """Weights, config, family row, number format, device, attention, and who computes."""
    parts = (
        _FORMAT,
        __version__,
        version("transformers"),
        fingerprint,
        backbone.config.to_json_string(),
        backbone.family,
        backbone.dtype,
        backbone.device.type,
        backbone.attention,
    )
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _path(key: str) -> Path:
    return cache_home() / "verified" / f"{key}.json"


def _says(path: Path, key: str) -> bool:
    try:
        noted = read_json(path, CheckpointError)
    except CheckpointError:
        return False
    return isinstance(noted, dict) and noted.get("key") == key


def _note(path: Path, contents: dict[str, str]) -> None:
    with suppress(OSError, ResultError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(contents) + "\n")
