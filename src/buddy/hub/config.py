"""config.json and generation_config.json, as transformers' objects; transformers opens neither.

A config can ask transformers for more than arithmetic: to import a package that reads quantised
weights, to fetch a kernel from the hub, to open a file of another name. Such keys never reach it.
"""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch

from buddy.backbone.families import find_family
from buddy.errors import CheckpointError
from buddy.hub.quiet import quiet_transformers
from buddy.hub.safe_paths import find_inside, read_table
from buddy.hub.wrap_errors import explained
from buddy.settings import Range

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"

_WIDTH: Final = Range(1, 2**20)
_RANGES: Final = {
    "num_hidden_layers": Range(1, 1024),
    "num_attention_heads": Range(1, 2**14),
    "num_key_value_heads": Range(1, 2**14),
    "head_dim": Range(1, 2**14),
    "hidden_size": _WIDTH,
    "intermediate_size": Range(1, 2**22),
    "moe_intermediate_size": Range(1, 2**22),
    "num_experts": Range(1, 4096),
    "num_local_experts": Range(1, 4096),
    "num_experts_per_tok": Range(1, 4096),
    "vocab_size": Range(1, 2**24),
    "max_position_embeddings": Range(1, 2**31),
    "partial_rotary_factor": Range(high=1, above=0),
}
"""What sizes may be: about ten times those of the largest models that are known. More would keep
transformers busy for hours before it finds that the weights are not there."""
QUANTISATION: Final = "quantization_config"
"""Key of a config that says how its weights are quantised."""
BUDDYS_OWN: Final = {"quant_method": "buddy"}
"""What it says where `hub.quantised_load` reads them."""
_QUANTISED: Final = (QUANTISATION, "compression_config")
_OLDER_NAMES: Final = frozenset({"torch_dtype", "rope_scaling"})
"""Keys that transformers still takes in place of its own."""
_MEANT_FOR_TRANSFORMERS: Final = frozenset(
    {
        *("use_cache", "cache_implementation", "cache_config", "compile_config"),
        *("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
        *("output_attentions", "output_hidden_states"),
    }
)
"""Wishes of makers that change no token, but the speed or what is returned beside tokens."""
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_config(folder: Path) -> Any:
    """The Hugging Face config of a model of a supported family.

    Raises:
        CheckpointError: config.json may not be read, is damaged, has a size that no model has, or
            is of quantised weights.
        FamilyError: The family is not supported.
    """
    from transformers import CONFIG_MAPPING

    path = folder / CONFIG
    values = read_table(folder, CONFIG)
    model_type = values.get("model_type")
    if model_type == "mistral" and "layer_types" in values:
        model_type = "ministral"  # as transformers takes it
    find_family(SimpleNamespace(**{**values, "model_type": model_type}))
    _check_ranges(path, values)
    for key in _QUANTISED:
        if values.get(key) not in (None, {}, BUDDYS_OWN):
            raise CheckpointError(
                f"{path} has {key}: its weights are quantised, and Buddy reads plain ones alone; "
                "load the model that they were made from, and quantise it with quant=int8 or int4"
            )
    kind = CONFIG_MAPPING[str(model_type)]
    advice = "correct it, or fetch or copy the model again"
    with quiet_transformers(), explained(f"{path} describes no model", advice):
        config = kind.from_dict(_allowed(kind, values), name_or_path=str(folder))
        config.to_json_string()  # a value of another type than transformers expects shows here
    find_family(config)
    if config.dtype is not None and config.dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: dtype must be float32, bfloat16, float16 or float64, got {config.dtype}"
        )
    return config


def _check_ranges(path: Path, values: dict[str, Any]) -> None:
    """Refuse sizes before anything is made of them."""
    tables = [values, *(values.get(key) for key in ("rope_parameters", "rope_scaling"))]
    for table in tables:
        for name, allowed in _RANGES.items():
            value = table.get(name) if isinstance(table, dict) else None
            if value is None:
                continue
            if type(value) not in (int, float) or value not in allowed:
                raise CheckpointError(
                    f"{path}: {name} must be {allowed}, got {str(value)[:80]}: correct it, or "
                    "fetch or copy the model again"
                )


def _allowed(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """What a config may say: fields of its class, and numbers that the class has no name for.

    Anything else is no description of a model but an instruction to transformers (which attention
    to fetch, which file to open, which code to run) or would replace a method of the config.
    """
    declared = {field.name for field in fields(kind)}
    plain = (bool, int, float, type(None))
    return {
        name: value
        for name, value in values.items()
        if name in declared
        or name in _OLDER_NAMES
        or (isinstance(value, plain) and not hasattr(kind, name) and not name.startswith("_"))
    }


def read_generation_config(folder: Path, vocab: int) -> Any:
    """What the model's makers say of which tokens to take; by default what its config says.

    `generate` would refuse some of what they say of speed, which nobody who calls it has asked for.

    Args:
        folder: Of the model.
        vocab: Tokens that the model has.

    Raises:
        CheckpointError: generation_config.json may not be read, is damaged, or names an end of text
            that the model does not have.
    """
    from transformers import GenerationConfig

    known = {name for name in vars(cast(Any, GenerationConfig)()) if not name.startswith("_")}
    known -= _MEANT_FOR_TRANSFORMERS
    path = find_inside(folder, GENERATION_CONFIG)
    values = read_table(folder, CONFIG if path is None else GENERATION_CONFIG)
    settings = {name: value for name, value in values.items() if name in known}
    where = path or folder / CONFIG
    advice = "correct or delete it"
    with quiet_transformers(), explained(f"{where} describes no generation", advice):
        make = GenerationConfig.from_dict if path else GenerationConfig.from_model_config
        config = make(settings)
        config._original_object_hash = hash(config)  # as transformers notes what it has read
    _check_token_ids(where, config)
    _check_ends(where, config.eos_token_id, vocab)
    return config


def _check_token_ids(path: Path, config: Any) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all(token is None or (type(token) is int and abs(token) < 2**31) for token in ids):
            raise CheckpointError(f"{path}: {name} must be a token's number, got {value!r}")


def _check_ends(path: Path, ends: Any, vocab: int) -> None:
    """Refuse an end of text that no answer could have: answers would go on to their limit.

    Pads may be out of the vocabulary: many models are saved so, and a pad is never fed.
    """
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None and not 0 <= token < vocab:
            raise CheckpointError(
                f"{path}: eos_token_id must be a token of the model, from 0 to {vocab - 1}, got "
                f"{token}: correct or delete it"
            )
