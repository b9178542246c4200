"""Loads a model that this machine has loaded before, without transformers' code for models.

The first load goes by `hub.loading`, which reads, checks and verifies all; what transformers made
of config.json is noted. Where there is no note, or the files hold other weights than were verified,
the model is loaded so again.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import find_family
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.skeleton import Skeleton, why_no_skeleton
from buddy.errors import CheckpointError
from buddy.hub.aligned_load import read_aligned
from buddy.hub.config import CONFIG, read_config, read_generation_config
from buddy.hub.device import pick_devices
from buddy.hub.loading import load_model, outline_model
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.notes import note_name, read_note, write_note
from buddy.hub.place import ModelPlace
from buddy.hub.progress import OnFetch
from buddy.hub.safe_paths import file_inside
from buddy.hub.verified import is_verified
from buddy.hub.weights import empty_model, is_leftover, open_weights, stored_dtypes


class NotedConfig(SimpleNamespace):
    """A config with the attributes that transformers' own had when the model was verified."""

    noted_json: str

    def to_json_string(self) -> str:
        """What transformers' config said of itself."""
        return self.noted_json


def outline_quickly(place: ModelPlace, *, on_progress: OnFetch | None = None) -> Any:
    """A causal LM on the meta device: a skeleton of a noted model, else `outline_model`.

    Raises:
        BuddyError: As `outline_model`.
    """
    folder = place.config_folder(on_progress)
    if (config := noted_config(folder)) is not None:
        with suppress(CheckpointError), open_weights(folder) as tensors:
            skeleton = _skeleton(folder, config, tensors)
            if skeleton is not None:
                return skeleton
    model = outline_model(place, on_progress=on_progress)
    model.generation_config = read_generation_config(folder, model.config.vocab_size)
    return model


def load_quickly(
    place: ModelPlace,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    on_progress: OnFetch | None = None,
    mapped: MappedWeights | None = None,
) -> Any:
    """A causal LM: the skeleton of a noted model, else what `load_model` loads; this is noted.

    Args:
        place: As `load_model` takes it.
        dtype: The same; a skeleton has the one that is stored.
        device: The same; a skeleton lies on a CPU.
        attention: The same; named, it is `load_model` that loads.
        on_progress: The same.
        mapped: The same; with it, it is `load_model` that loads.

    Raises:
        BuddyError: As `load_model`.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "attention": attention}
    is_plain = attention is None and mapped is None
    if is_plain and [each.type for each in pick_devices(device)] == ["cpu"]:
        folder = place.folder(on_progress)
        if (config := noted_config(folder)) is not None:
            skeleton = _load(folder, config, dtype)
            if skeleton is not None:
                return skeleton
    model = load_model(place, on_progress=on_progress, mapped=mapped, **options)
    if is_plain and dtype is None and model.device.type == "cpu":
        _note(place.folder(), model.config)
    return model


def _load(folder: Path, config: NotedConfig, dtype: torch.dtype | None) -> Skeleton | None:
    """A noted model with its weights; None where they are not those that were verified."""
    with suppress(CheckpointError), open_weights(folder) as tensors:
        skeleton = _skeleton(folder, config, tensors)
        if skeleton is None or dtype not in (None, skeleton.lm_head.weight.dtype):
            return None
        skeleton.load(read_aligned(folder, tensors))
        if is_verified(Backbone(skeleton), base_fingerprint(skeleton)):
            return skeleton
    return None


def _skeleton(folder: Path, config: NotedConfig, tensors: dict[str, Any]) -> Skeleton | None:
    """A noted model without weights; None where the files do not hold just its weights."""
    weights = {name: tensor for name, tensor in tensors.items() if not is_leftover(name)}
    if stored_dtypes(weights) != [config.dtype]:
        return None
    generation_config = read_generation_config(folder, config.vocab_size)
    wholes = partial(_whole_blocks, folder, config._attn_implementation)
    skeleton = Skeleton(config, generation_config, weights, config.dtype, wholes)
    shapes = {name: tensor.get_shape() for name, tensor in weights.items()}
    return skeleton if skeleton.fits(shapes) else None


def _whole_blocks(folder: Path, attention: str) -> Sequence[nn.Module]:
    """All blocks as transformers makes them, without weights."""
    config = read_config(folder)
    config._attn_implementation = attention
    return cast(Sequence[nn.Module], empty_model(config).model.layers)


def noted_config(folder: Path) -> NotedConfig | None:
    """What was noted of the config.json of a folder; None where nothing was, by these versions."""
    try:
        noted = read_note(_note_name(folder))
        values = dict(noted["values"])
        dtype = getattr(torch, values["dtype"])
        config = NotedConfig(**{**values, "dtype": dtype}, noted_json=noted["json"])
        find_family(config)
        return None if why_no_skeleton(config) else config
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _note(folder: Path, config: Any) -> None:
    """Note a config as the model has it that was loaded and verified."""
    if why_no_skeleton(config) is not None:
        return
    values = {
        **config.to_dict(),
        "_attn_implementation": config._attn_implementation,
        "name_or_path": config.name_or_path,
    }
    write_note(_note_name(folder), {"values": values, "json": config.to_json_string()})


def _note_name(folder: Path) -> str:
    """The name under which a config is noted: by the folder, and what config.json says.

    Raises:
        CheckpointError: config.json may not be read.
    """
    content = file_inside(folder, CONFIG).read_bytes()
    return note_name("config", folder.resolve(), content)
