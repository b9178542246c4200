"""Finds a model by preset name, hub id, local folder or GGUF file, and loads it safely.

transformers opens no file of the folder: it is given a config that was checked (`hub.config`), the
tensors of checked safetensors (`hub.weights`), and for the tokenizer a folder that Buddy wrote
(`hub.tokenizer`). No code of a folder is run.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

import torch

from buddy.backbone.families import find_family
from buddy.depth.prior import Prior
from buddy.errors import CheckpointError, ModelError
from buddy.files import parse_json
from buddy.hub.aligned_load import read_placed
from buddy.hub.config import read_config, read_generation_config
from buddy.hub.hugging_face import pull_from_hub
from buddy.hub.manifest import MANIFEST, base_of, check_listed, is_checkpoint
from buddy.hub.presets import DEFAULT_MODEL, PRESETS
from buddy.hub.progress import Progress
from buddy.hub.quiet import quiet_transformers
from buddy.hub.safe_paths import user_path
from buddy.hub.store import ensure_default, is_cached, resolve_gguf
from buddy.hub.tokenizer import holds_tokenizer, read_tokenizer, tokenizer_files
from buddy.hub.verified import verify_once
from buddy.hub.weights import (
    check_sizes,
    is_leftover,
    open_weights,
    stored_dtype,
    stored_dtypes,
    weight_files,
)
from buddy.hub.wrap_errors import explained
from buddy.routing.prior import normalise_prior

_LONGEST_NAME: Final = 255
"""Bytes of a file's name; nothing has a longer one."""


def shipped_checkpoint(name: str | Path) -> Path | None:
    """The folder of a preset that ships trained; None for any other name."""
    preset = PRESETS.get(str(name))
    if preset is None or preset.trained is None:
        return None
    return Path(str(files("buddy.hub") / "trained" / preset.trained))


def model_folder(name: str | Path) -> Path | None:
    """The folder that a name stands for, there or not; None of a preset that ships none.

    A preset's name is the preset's, whatever lies in the current folder: `./NAME` is a folder's.
    """
    return shipped_checkpoint(name) if str(name) in PRESETS else user_path(name)


def checkpoint_folder(name: str | Path) -> Path | None:
    """The folder of the Buddy checkpoint that a name stands for; None where it stands for none."""
    folder = model_folder(name)
    return folder if folder is not None and is_checkpoint(folder) else None


def _base_name(name: str | Path) -> str:
    """What names the base model of a Buddy checkpoint; any other name as it is.

    Raises:
        ModelError: It names a user's folder where there is none.
    """
    if any(len(part.encode()) > _LONGEST_NAME for part in user_path(name).parts):
        raise ModelError(f"no model is called {str(name)[:80]!r}...: the name is too long")
    checkpoint = checkpoint_folder(name)
    return str(name) if checkpoint is None else base_model(checkpoint)


def locate(name: str | Path, *, on_progress: Progress | None = None) -> str:
    """Turn a model's name into a local folder or a hub id; fetch the default model if needed.

    Raises:
        FetchError: The default model could not be fetched.
        CheckpointError: A file or folder is not a model.
    """
    text = _base_name(name)
    if text == DEFAULT_MODEL:
        return str(ensure_default(on_progress=on_progress))
    if text in PRESETS:
        return str(PRESETS[text].hub_id)
    path = user_path(text)
    if path.suffix.lower() == ".gguf":
        return str(resolve_gguf(path, on_progress=on_progress))
    if path.is_dir():
        check_folder(path)
        return str(path)
    if path.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(
            f"no model at {text}: expected a folder with config.json and *.safetensors, a .gguf "
            "file, a hub id such as org/name, or a name that `buddy models` lists"
        )
    if "/" not in text:
        raise ModelError(
            f"no model named {text!r}: expected a name that `buddy models` lists, a hub id such "
            "as org/name, a folder, or a .gguf file"
        )
    return text


def local_folder(
    name: str | Path, *, config_only: bool = False, on_progress: Progress | None = None
) -> str:
    """The folder of a model, fetched from the hub if it is not on this machine.

    Raises:
        ModelError: It cannot be found or fetched.
        CheckpointError: It holds no weights that are safe to load.
    """
    where = locate(name, on_progress=on_progress)
    if Path(where).is_dir():
        return where
    folder = pull_from_hub(where, config_only=config_only)
    if not config_only:
        check_folder(Path(folder))
    return folder


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no model, or that has no safetensors to read.

    Raises:
        CheckpointError: It is none.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{folder} is no model: expected config.json in it, or buddy.json "
            "for a Buddy checkpoint"
        )
    weight_files(folder)


def base_model(checkpoint: Path) -> str:
    """The name of the model that a Buddy checkpoint was made for.

    Raises:
        CheckpointError: buddy.json is damaged, or names another Buddy checkpoint or itself.
    """
    source = base_of(checkpoint)
    backbone = checkpoint / "backbone"
    if source == str(backbone):
        check_listed(checkpoint, [f"backbone/{name}" for name in tokenizer_files(backbone)])
    if checkpoint_folder(source) is not None:
        raise CheckpointError(
            f"{checkpoint / MANIFEST} names another Buddy checkpoint as its base model, {source}: "
            "expected a model that is none"
        )
    return source


def load_config(name: str | Path, *, on_progress: Progress | None = None) -> Any:
    """The Hugging Face config of a model of a supported family.

    Raises:
        ModelError: It cannot be found or fetched.
        FamilyError: The family is not supported.
    """
    if _base_name(name) == DEFAULT_MODEL and not is_cached(DEFAULT_MODEL):
        where = str(files("buddy.hub") / "configs" / DEFAULT_MODEL)  # so that it needs no fetch
    else:
        where = local_folder(name, config_only=True, on_progress=on_progress)
    return read_config(Path(where))


def named_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None where none is named, which leaves weights as saved."""
    return None if name is None else cast(torch.dtype, getattr(torch, name))


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Load a Hugging Face causal LM, ready for inference, and verify it if it is new.

    Args:
        name: Preset, hub id, folder or GGUF file.
        dtype: Of the weights; by default as they were saved.
        device: By default the first CUDA device, else the CPU.
        attention: "sdpa" or "eager"; by default "sdpa", where it computes the family.
        on_progress: Told what is being fetched or converted.

    Raises:
        ModelError: It cannot be found, fetched or understood.
        FamilyError: Its family is not supported, or it is not computed as transformers does.
        CheckpointError: It is truncated or unsafe.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(name, on_progress=on_progress)
    attention = _attention(config, attention)
    where = Path(local_folder(name, on_progress=on_progress))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    advice = "fetch or copy the model again"
    generation_config = read_generation_config(where)
    with open_weights(where) as tensors:
        check_sizes(config, tensors)
        dtype = dtype or config.dtype or stored_dtype(tensors)
        state: dict[str, Any] = tensors
        if torch.device(device).type == "cpu" and stored_dtypes(tensors) == {dtype}:
            state = read_placed(where, tensors)
        with quiet_transformers(), explained(f"the model in {where} cannot be loaded", advice):
            kind = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # and refused below, by name
                output_loading_info=True,
            )
    _check_whole(where, report)
    model.config.name_or_path = str(where)
    model.generation_config = generation_config  # here, as from_pretrained would make another of it
    model = model.eval().to(torch.device(device))
    with explained(f"the model in {where} cannot be run", advice):
        verify_once(model)
    return model


def is_stored_in(name: str | Path, dtype: torch.dtype) -> bool:
    """Whether all weights of a model are stored in this number format."""
    with open_weights(Path(local_folder(name))) as tensors:
        return stored_dtypes(tensors) == {dtype}


def _attention(config: Any, asked: str | None) -> str:
    """The attention function to load a model with."""
    family = find_family(config)
    if asked is not None and asked not in family.implementations:
        raise ModelError(
            f"attention must be {' or '.join(family.implementations)} for {family.title}, got "
            f"{asked!r}"
        )
    return asked or family.implementations[0]


def _check_whole(where: Path, report: Any) -> None:
    """Refuse weights that do not fit their config: the rest would be random, or left out."""
    extra = {name for name in report["unexpected_keys"] if not is_leftover(name)}
    mismatched = {str(name) for name, *_ in report["mismatched_keys"]}
    wrong = sorted({*report["missing_keys"], *extra, *mismatched})
    if wrong:
        raise CheckpointError(
            f"the weights in {where} do not fit its config.json: {len(wrong)} tensors are missing, "
            f"unexpected or of another shape, such as {wrong[0][:200]!r}; fetch or copy the model "
            "again"
        )


def load_tokenizer(name: str | Path = DEFAULT_MODEL) -> Any:
    """The Hugging Face tokenizer of a model, padding on the left.

    Raises:
        ModelError: It cannot be found, fetched or understood.
    """
    path = checkpoint_folder(name)
    if path is not None and holds_tokenizer(path):
        check_listed(path, tokenizer_files(path))
        return read_tokenizer(path)
    return read_tokenizer(Path(local_folder(name)))


def load_prior(name: str | Path) -> Prior | None:
    """The prior that ships with a preset; None where there is none."""
    preset = PRESETS.get(str(name))
    if preset is None or preset.prior is None:
        return None
    text = (files("buddy.hub") / "priors" / preset.prior).read_text()
    record = parse_json(text, preset.prior, CheckpointError)
    importance = torch.tensor(record["results"]["importance"])
    return Prior(normalise_prior(importance[1:-1]), f"prior that ships, {preset.prior}")
