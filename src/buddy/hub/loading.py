"""Loads a base model safely, and writes one.

transformers opens no file of the folder: it is given a config that was checked (`hub.config`), the
tensors of checked safetensors (`hub.weights`), and for the tokenizer a folder that Buddy wrote
(`hub.tokenizer`). No code of a folder is run.
"""

from pathlib import Path
from typing import Any, cast

import torch

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import find_family
from buddy.backbone.memory import keep
from buddy.depth.cost import ModelShape
from buddy.errors import CheckpointError, ModelError
from buddy.hub.aligned_load import read_aligned
from buddy.hub.config import read_config, read_generation_config
from buddy.hub.device import pick_devices
from buddy.hub.device_map import map_devices
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.place import ModelPlace
from buddy.hub.progress import OnFetch
from buddy.hub.quiet import quiet_transformers
from buddy.hub.verified import verify_once
from buddy.hub.weights import (
    check_sizes,
    empty_model,
    is_leftover,
    open_weights,
    stored_dtypes,
)
from buddy.hub.wrap_errors import explained


def named_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None where none is named, which leaves weights as saved."""
    return None if name is None else cast(torch.dtype, getattr(torch, name))


def outline_model(place: ModelPlace, *, on_progress: OnFetch | None = None) -> Any:
    """A Hugging Face causal LM on the meta device, as its config alone describes it.

    Raises:
        ModelError: It cannot be fetched.
        FamilyError: The family is not supported.
    """
    return empty_model(read_config(place.config_folder(on_progress)))


def inspect_model(
    place: ModelPlace, *, on_progress: OnFetch | None = None
) -> tuple[str, ModelShape, int]:
    """A model's family and sizes, from its config alone.

    Returns:
        The family's title, the shape, and the context in tokens.

    Raises:
        ModelError: It cannot be fetched or taken apart.
        FamilyError: The family is not supported.
    """
    model = outline_model(place, on_progress=on_progress)
    with explained(f"{place.name} cannot be taken apart", "fetch or copy the model again"):
        backbone = Backbone(model)
    return backbone.family.title, backbone.shape(), backbone.context


def load_model(
    place: ModelPlace,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    on_progress: OnFetch | None = None,
    mapped: MappedWeights | None = None,
) -> Any:
    """Load a Hugging Face causal LM, ready for inference, and verify it if it is new.

    Args:
        place: Where the model lies, fetched or not.
        dtype: Of the weights; by default as they were saved.
        device: "cpu", "cuda", "cuda:1" or "mps"; several of CUDA, "cuda:0,cuda:1", or "auto" for
            all; by default the first CUDA device, else the CPU.
        attention: "sdpa" or "eager"; by default "sdpa", where it computes the family.
        on_progress: Told what is being fetched or converted.
        mapped: Maps the weights, which stay in their files where they are stored in this number
            format: of a model on the CPU that is to be converted, or shared among processes.

    Raises:
        ModelError: It cannot be fetched or understood, or the device cannot be had.
        FamilyError: Its family is not supported, or it is not computed as transformers does.
        CheckpointError: It is truncated or unsafe.
    """
    devices = pick_devices(device)
    config = read_config(place.config_folder(on_progress))
    attention = attention_of(config, attention)
    where = place.folder(on_progress)
    advice = "fetch or copy the model again"
    generation_config = read_generation_config(where, config.vocab_size)
    with open_weights(where) as tensors:
        check_sizes(config, tensors)
        stored = stored_dtypes(tensors)
        dtype = dtype or config.dtype or next(iter(stored), torch.float32)
        state: dict[str, Any] = tensors
        is_on_cpu = devices[0].type == "cpu"
        device_map = None if is_on_cpu else map_devices(config, devices, dtype)
        if is_on_cpu and mapped is None and stored == [dtype]:
            state = read_aligned(where, tensors)
        with quiet_transformers(), explained(f"the model in {where} cannot be loaded", advice):
            if is_on_cpu and mapped is not None:
                state = tensors | mapped.map(where, tensors, dtype)
            model, report = make_model(config, state, dtype, attention, device_map)
    check_whole(where, report)
    _state_ties(model)
    model.config.name_or_path = str(where)
    model.generation_config = generation_config  # here, as from_pretrained would make another of it
    model.eval()
    with explained(f"the model in {where} cannot be run", advice):
        verify_once(model, keep if mapped is None else mapped.release)
    if len(devices) > 1:
        _undispatch(model)
    return model


def make_model(
    config: Any,
    state: dict[str, Any],
    dtype: torch.dtype,
    attention: str,
    device_map: dict[str, torch.device] | None = None,
) -> tuple[Any, Any]:
    """A model of transformers, and what it reports of names and shapes: see `check_whole`.

    Args:
        config: Of the model.
        state: Its tensors by name.
        dtype: What they are converted to.
        attention: Name of the attention function.
        device_map: Where each part goes at once.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=dtype,
        attn_implementation=attention,
        device_map=device_map,
        ignore_mismatched_sizes=True,  # and refused by name
        output_loading_info=True,
    )
    return model, report


def _undispatch(model: Any) -> None:
    """Take off what moves tensors to each module of a model: Buddy moves them to each block."""
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    for name in ("to", "cuda"):  # which would warn, and move the model that a copy was made of
        vars(model).pop(name, None)


def stored_dtype(place: ModelPlace) -> torch.dtype | None:
    """The number format in which all weights of a model are stored; None where they have several.

    Raises:
        ModelError: They cannot be fetched.
        CheckpointError: They are truncated or unsafe.
    """
    with open_weights(place.folder()) as tensors:
        stored = stored_dtypes(tensors)
    return stored[0] if len(stored) == 1 else None


def attention_of(config: Any, asked: str | None) -> str:
    """The attention function to load a model with."""
    family = find_family(config)
    if asked is not None and asked not in family.implementations:
        raise ModelError(
            f"attention must be {' or '.join(family.implementations)} for {family.title}, got "
            f"{asked!r}"
        )
    return asked or family.implementations[0]


def check_whole(where: Path, report: Any) -> None:
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


def _state_ties(model: Any) -> None:
    """Have the config say whether the head is the embedding: other programs would make it so."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = head.weight is embedding.weight


def write_model(model: Any, folder: Path, **options: Any) -> None:
    """Write config, generation config and weights, as transformers does.

    Args:
        model: A model of transformers.
        folder: Made where it is missing.
        **options: As `save_pretrained` takes them.

    Raises:
        CheckpointError: Its generation config was changed, and transformers does not write it.
        OSError: A file cannot be written.
    """
    _state_ties(model)
    write_generation_config(model, folder)
    with quiet_transformers():
        model.save_pretrained(folder, **options)


def write_generation_config(model: Any, folder: Path) -> None:
    """Write a model's generation config.

    transformers refuses those that contradict themselves. One that is as its makers published it is
    written as it is, whatever it says.

    Args:
        model: A model of transformers.
        folder: Made where it is missing.

    Raises:
        CheckpointError: It was changed, and transformers does not write it.
        OSError: It cannot be written.
    """
    advice = "correct model.generation_config"
    what = "the model's generation config cannot be written"
    with quiet_transformers(), explained(what, advice, (OSError,)):
        model.generation_config.save_pretrained(folder)
