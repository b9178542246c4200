"""What a model's name stands for: a base model, or a Buddy checkpoint and the base that it names.

Whatever loads takes a `Resolved`, so that a name is looked up no more often than it is asked for.
"""

import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from buddy.checkpoint.listed_files import MANIFEST, check_file
from buddy.checkpoint.manifest import Manifest, is_checkpoint, read_manifest
from buddy.errors import CheckpointError
from buddy.hub.place import ModelPlace, find_model
from buddy.hub.presets import DEFAULT_MODEL, PRESETS
from buddy.hub.safe_paths import user_path
from buddy.hub.tokenizer import holds_tokenizer, read_tokenizer, tokenizer_files

BACKBONE_FOLDER = "backbone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A Buddy checkpoint; its buddy.json was read, and its files are not checked yet."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A model that was found; nothing of it is fetched yet."""

    name: str
    """Text that a user wrote."""
    base: ModelPlace
    """The base model."""
    checkpoint: Checkpoint | None = None
    """What was trained for it; None where the name stands for the base model itself."""

    @property
    def key(self) -> str:
        """One text for one model, whatever name it came by: a hub id, or a path in full."""
        if self.checkpoint is not None:
            folder = self.checkpoint.folder
            return self.name if folder == shipped_checkpoint(self.name) else str(folder.resolve())
        return self.base.where if self.base.kind == "hub" else self.base.source

    def load_tokenizer(self) -> Any:
        """The Hugging Face tokenizer, padding on the left: the checkpoint's, or else the base's.

        Raises:
            ModelError: It cannot be fetched or understood, or has been changed.
        """
        if self.checkpoint is not None and holds_tokenizer(self.checkpoint.folder):
            folder = self.checkpoint.folder
            for name in tokenizer_files(folder):
                check_file(folder, name, self.checkpoint.manifest.files)
            return read_tokenizer(folder)
        return read_tokenizer(self.base.folder())


ModelName = str | Path | Resolved
"""Preset, hub id, folder, GGUF file or Buddy checkpoint; or what was found under such a name."""


def resolve(name: ModelName) -> Resolved:
    """Find what a name stands for.

    Raises:
        ModelError: Nothing is called so.
        CheckpointError: A checkpoint's buddy.json is damaged, or names another checkpoint or itself
            as its base model.
    """
    if isinstance(name, Resolved):
        return name
    folder = named_folder(name)
    if folder is None or not is_checkpoint(folder):
        return Resolved(name=str(name), base=find_model(name))
    manifest = read_manifest(folder)
    source = manifest.base.source
    if source is None:
        backbone = folder / BACKBONE_FOLDER
        for file in tokenizer_files(backbone):
            check_file(folder, f"{BACKBONE_FOLDER}/{file}", manifest.files)
        source = str(backbone)
    base = find_model(source)
    ships = base.kind == "published" and shipped_checkpoint(base.where) is not None
    if ships or (base.kind == "folder" and is_checkpoint(Path(base.where))):
        raise CheckpointError(
            f"{folder / MANIFEST} names another Buddy checkpoint as its base model, {source}: "
            "expected a model that is none"
        )
    checkpoint = Checkpoint(folder=folder, manifest=manifest)
    return Resolved(name=str(name), base=base, checkpoint=checkpoint)


def load_tokenizer(name: ModelName = DEFAULT_MODEL) -> Any:
    """The Hugging Face tokenizer of a model, padding on the left.

    Raises:
        ModelError: It cannot be found, fetched or understood.
    """
    return resolve(name).load_tokenizer()


def named_folder(name: str | Path) -> Path | None:
    """The folder that a name would be of, there or not; None for a preset that ships none."""
    if str(name) in PRESETS:
        return shipped_checkpoint(name)
    folder = user_path(name)
    return folder if os.path.exists(folder) else shipped_checkpoint(name) or folder


def shipped_checkpoint(name: str | Path) -> Path | None:
    """The folder of what ships trained for a preset or its hub id; None for any other name."""
    for preset_name, preset in PRESETS.items():
        if preset.trained is not None and str(name) in (preset_name, preset.hub_id):
            return Path(str(files("buddy.hub") / "trained" / preset.trained))
    return None
