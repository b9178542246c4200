"""Where a base model lies that a name stands for: a preset, a hub id, a folder or a GGUF file.

A preset's name is the preset's, whatever lies in the current folder: `./NAME` is a folder's.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

from buddy.errors import CheckpointError, ModelError
from buddy.hub.config import CONFIG
from buddy.hub.folder import is_cached
from buddy.hub.hugging_face import pull_from_hub
from buddy.hub.presets import PRESETS
from buddy.hub.progress import OnFetch
from buddy.hub.safe_paths import user_path
from buddy.hub.store import ensure_published, published_gguf, resolve_gguf
from buddy.hub.weights import weight_files

_LONGEST_NAME: Final = 255
"""Bytes of a file's name; nothing has a longer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlace:
    """A base model that was found; nothing of it is fetched or read yet."""

    name: str
    """Text that a user, or a checkpoint, names it by."""
    kind: Literal["published", "hub", "folder", "gguf"]
    where: str
    """The name of a published model, a hub id, or a path."""

    @property
    def source(self) -> str:
        """What finds the model again, from any folder of this machine."""
        is_path = self.kind in ("folder", "gguf")
        return str(Path(self.where).resolve()) if is_path else self.name

    def folder(self, on_progress: OnFetch | None = None) -> Path:
        """The folder of its files, which are fetched or converted if they are not on this machine.

        Raises:
            FetchError: It cannot be fetched.
            CheckpointError: It is damaged or no model, or holds no weights that are safe to load.
        """
        if self.kind == "published":
            return ensure_published(self.where, on_progress=on_progress)
        if self.kind == "gguf":
            return resolve_gguf(self.where, on_progress=on_progress)
        folder = Path(self.where if self.kind == "folder" else pull_from_hub(self.where))
        _check_folder(folder)
        return folder

    @property
    def gguf(self) -> Path | None:
        """The GGUF file that its weights were converted from, where it is on this machine."""
        if self.kind == "published":
            return published_gguf(self.where)
        return Path(self.where) if self.kind == "gguf" else None

    def config_folder(self, on_progress: OnFetch | None = None) -> Path:
        """A folder with its config.json, for which as little as possible is fetched.

        Raises:
            ModelError: As `folder`.
        """
        if self.kind == "published" and not is_cached(self.where):
            return Path(str(files("buddy.hub") / "configs" / self.where))
        if self.kind == "hub":
            return Path(pull_from_hub(self.where, config_only=True))
        return self.folder(on_progress)


def find_model(name: str | Path) -> ModelPlace:
    """Find the base model that a name stands for.

    Raises:
        ModelError: There is none.
    """
    text, path = str(name), user_path(name)
    if any(len(part.encode()) > _LONGEST_NAME for part in path.parts):
        raise ModelError(f"no model is called {text[:80]!r}...: the name is too long")
    if text in PRESETS:
        hub_id = PRESETS[text].hub_id
        kind: Literal["hub", "published"] = "published" if hub_id is None else "hub"
        return ModelPlace(name=text, kind=kind, where=hub_id or text)
    if path.suffix.lower() == ".gguf":
        return ModelPlace(name=text, kind="gguf", where=str(path))
    if path.is_dir():
        return ModelPlace(name=text, kind="folder", where=str(path))
    hub_id, at, revision = text.partition("@")
    is_path = text.startswith((".", "/", "~")) or hub_id.count("/") > 1 or bool(at and not revision)
    if path.exists() or is_path:
        raise ModelError(
            f"no model at {text}: expected a folder with config.json and *.safetensors, a .gguf "
            "file, a hub id such as org/name or org/name@revision, or a name that `buddy models` "
            "lists"
        )
    if "/" not in text:
        raise ModelError(
            f"no model named {text!r}: expected a name that `buddy models` lists, a hub id such "
            "as org/name, a folder, or a .gguf file"
        )
    return ModelPlace(name=text, kind="hub", where=text)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that is no model, or that has no safetensors to read."""
    if not (folder / CONFIG).exists():
        hint = ""
        if (folder / "adapter_config.json").exists():
            hint = (
                "; it is an adapter of another model: merge it into that one with PEFT's "
                "merge_and_unload, and save the result"
            )
        raise CheckpointError(
            f"{folder} is no model: expected config.json in it, or buddy.json "
            f"for a Buddy checkpoint{hint}"
        )
    weight_files(folder)
