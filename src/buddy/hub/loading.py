"""Finds a model by preset name, hub id, local folder or GGUF file, and loads it safely.

Weights are read from safetensors alone, and no code of a repository is run.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError

from buddy.backbone.families import find_family
from buddy.depth.prior import Prior
from buddy.errors import CheckpointError, ModelError
from buddy.hub.hugging_face import pull_from_hub
from buddy.hub.presets import DEFAULT_MODEL, PRESETS
from buddy.hub.progress import Progress
from buddy.hub.quiet import quiet_transformers
from buddy.hub.store import ensure_default, resolve_gguf
from buddy.hub.verified import verify_once
from buddy.routing.prior import normalise_prior

_LOADING_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, StrictDataclassError)
"""What transformers raises on files that are missing, damaged or not what they say."""


def shipped_checkpoint(name: str | Path) -> Path | None:
    """The folder of a preset that ships trained; None for any other name."""
    preset = PRESETS.get(str(name))
    if preset is None or preset.trained is None:
        return None
    return Path(str(files("buddy.hub") / "trained" / preset.trained))


def locate(name: str | Path, *, on_progress: Progress | None = None) -> str:
    """Turn a model's name into a local folder or a hub id; fetch the default model if needed.

    Raises:
        FetchError: The default model could not be fetched.
        CheckpointError: A file or folder is not a model.
    """
    text = str(shipped_checkpoint(name) or name)
    if text == DEFAULT_MODEL:
        return str(ensure_default(on_progress=on_progress))
    if text in PRESETS:
        return str(PRESETS[text].hub_id)
    path = Path(text).expanduser()
    if (path / "buddy.json").is_file():
        return locate(_base_of(path), on_progress=on_progress)
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
    """Refuse a folder that is no model, or that only a pickle could be read from."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is no model: expected config.json in it, or buddy.json "
            "for a Buddy checkpoint"
        )
    if not any(folder.glob("*.safetensors")):
        unsafe = sorted(path.name for path in folder.glob("*.bin"))
        found = f"found only {unsafe[0]}, which can run code when read" if unsafe else "found none"
        raise CheckpointError(
            f"{folder} has no weights that are safe to load: expected *.safetensors, {found}; "
            "convert them with transformers' save_pretrained"
        )


def load_config(name: str | Path, *, on_progress: Progress | None = None) -> Any:
    """The Hugging Face config of a model of a supported family.

    Raises:
        ModelError: It cannot be found or fetched.
        FamilyError: The family is not supported.
    """
    from transformers import AutoConfig

    where = local_folder(name, config_only=True, on_progress=on_progress)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise _explained(where, error) from error
    find_family(config)
    return config


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
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = load_config(name, on_progress=on_progress)
    attention = _attention(config, attention)
    where = local_folder(name, on_progress=on_progress)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with quiet_transformers():
            model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
                where,
                config=config,
                dtype=dtype or "auto",
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights in {where} are truncated or damaged ({error}): copy or fetch them again"
        ) from error
    except _LOADING_ERRORS as error:
        raise _explained(where, error) from error
    _check_whole(where, model, report)
    model = model.eval().to(torch.device(device))
    verify_once(model)
    return model


def _attention(config: Any, asked: str | None) -> str:
    """The attention function to load a model with."""
    family = find_family(config)
    if asked is not None and asked not in family.implementations:
        raise ModelError(
            f"attention must be {' or '.join(family.implementations)} for {family.title}, got "
            f"{asked!r}"
        )
    return asked or family.implementations[0]


def _check_whole(where: str, model: Any, report: Any) -> None:
    """Refuse weights that do not fit their config: the rest would be random, or left out."""
    # A buffer that older files still carry, such as rotary frequencies, is no weight.
    extra = {name for name in report["unexpected_keys"] if not name.endswith("inv_freq")}
    wrong = sorted({*report["missing_keys"], *extra, *map(str, report["mismatched_keys"])})
    if wrong:
        raise CheckpointError(
            f"the weights in {where} do not fit its config.json: {len(wrong)} tensors are missing, "
            f"unexpected or of another shape, such as {wrong[0]}; fetch or copy the model again"
        )


def load_tokenizer(name: str | Path = DEFAULT_MODEL) -> Any:
    """The Hugging Face tokenizer of a model, padding on the left.

    Raises:
        ModelError: It cannot be found, fetched or understood.
    """
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    own = (path / "buddy.json").is_file() and (path / "tokenizer_config.json").is_file()
    where = str(path) if own else local_folder(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, trust_remote_code=False, padding_side="left"
        )
    except _LOADING_ERRORS as error:
        raise CheckpointError(
            f"the tokenizer of {name} cannot be loaded from {where}: {_first_line(error)} "
            "Save one there with the tokenizer's save_pretrained"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _base_of(name: str | Path) -> str | Path:
    """The model that a Buddy checkpoint was made for."""
    path = Path(name)
    if (path / "backbone").is_dir():
        return path / "backbone"
    try:
        return str(json.loads((path / "buddy.json").read_text())["base"]["source"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / 'buddy.json'} is damaged: {error}") from error


def load_prior(name: str | Path) -> Prior | None:
    """The prior that ships with a preset; None where there is none."""
    preset = PRESETS.get(str(name))
    if preset is None or preset.prior is None:
        return None
    text = (files("buddy.hub") / "priors" / preset.prior).read_text()
    importance = torch.tensor(json.loads(text)["results"]["importance"])
    return Prior(normalise_prior(importance[1:-1]), f"prior that ships, {preset.prior}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _explained(where: str, error: Exception) -> CheckpointError:
    """Say in one line why transformers could not load a model."""
    return CheckpointError(f"the model in {where} cannot be loaded: {_first_line(error)}")
