"""GGUF to a Hugging Face folder in bfloat16, once, so that every later load is a memory map.

transformers reads the file; what it would read wrongly or not at all is refused or put right here.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buddy.errors import CheckpointError
from buddy.files import system_errors
from buddy.hub.gguf.header import GgufHeader
from buddy.hub.gguf.rope import rope_scaling
from buddy.hub.gguf.sampling import sampling_wishes
from buddy.hub.gguf.tokenizer import load_tokenizer, stop_token_ids
from buddy.hub.progress import OnFetch
from buddy.hub.quiet import quiet_transformers
from buddy.hub.weights import empty_model
from buddy.hub.wrap_errors import explained

WEIGHTS_FILE = "model.safetensors"


def convert_gguf(header: GgufHeader, folder: Path, on_progress: OnFetch) -> None:
    """Write config, weights and tokenizer of a GGUF file into an empty folder.

    Args:
        header: Of the file, which `read_header` has checked.
        folder: Exists and is empty.
        on_progress: Told of the convert stage; nothing is written to stdout or stderr.

    Raises:
        CheckpointError: transformers cannot read the file, or reads only part of it.
        OSError: The folder cannot be written.
    """
    on_progress("convert", 0, len(header.tensors))
    advice = (
        "expected a GGUF file with llama.cpp's metadata; convert the model again or use its "
        "safetensors folder"
    )
    with _reported(on_progress):
        with explained(f"{header.path} cannot be read", advice):
            tokenizer = load_tokenizer(header, folder)
            model = _load_model(header, folder)
            _describe_generation(model, tokenizer, header)
        _save(model, tokenizer, folder)


def _load_model(header: GgufHeader, folder: Path) -> Any:
    """The model with dense bfloat16 weights, every one of them from the file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    config = AutoConfig.from_pretrained(folder, gguf_file=str(header.path))
    head_dim = header.of_model("attention.key_length")
    if head_dim is not None:
        config.head_dim = head_dim
    _require_room(config, header)
    config.rope_parameters = config.rope_parameters | rope_scaling(header)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        gguf_file=str(header.path),
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, loading = loaded
    _require_whole(model, loading["missing_keys"], header)
    # Either would say that the weights are still packed, and keep the model from being saved.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    return model


def _require_room(config: Any, header: GgufHeader) -> None:
    """Refuse sizes that the file has not nearly the weights for, before any memory is taken."""
    weights = sum(parameter.numel() for parameter in empty_model(config).parameters())
    if weights > 2 * header.num_weights:
        raise _misfit(header, weights)


def _misfit(header: GgufHeader, num_weights: int) -> CheckpointError:
    return CheckpointError(
        f"{header.path} holds {header.num_weights} weights, but a {header.architecture} model "
        f"of its sizes has {num_weights}; use the model's safetensors folder instead"
    )


def _require_whole(model: Any, missing: Iterable[str], header: GgufHeader) -> None:
    """Refuse a file that lacks weights, has weights the model has no place for, or holds NaN."""
    import torch

    lacking = sorted(missing)
    if lacking:
        raise CheckpointError(
            f"{header.path} lacks {len(lacking)} weights of a {header.architecture} model, "
            f"{lacking[0]} among them; download it again or use another file"
        )
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights != header.num_weights:
        raise _misfit(header, num_weights)
    for name, parameter in model.named_parameters():
        # A norm is finite only when every number is, and is far cheaper than asking each.
        if not torch.linalg.vector_norm(parameter).isfinite():
            raise CheckpointError(
                f"{header.path} is damaged: {name} holds numbers that are not finite; "
                "copy or download it again"
            )


def _describe_generation(model: Any, tokenizer: Any, header: GgufHeader) -> None:
    """Make model and tokenizer agree on how a text begins, ends, is padded and is drawn."""
    model.generation_config.update(**sampling_wishes(header))
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.eos_token_id = stop_token_ids(tokenizer, header)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.should_save_on_this_rank = lambda is_main: True  # of a launch, whoever has the lock
    with system_errors():
        # One file, whatever its size.
        model.save_pretrained(folder, max_shard_size=1 << 62)
        tokenizer.save_pretrained(folder)
    # safetensors writes for the owner alone; a shared cache needs what the other files have.
    (folder / WEIGHTS_FILE).chmod((folder / "config.json").stat().st_mode)


@contextmanager
def _reported(on_progress: OnFetch) -> Iterator[None]:
    """Turn transformers' bar over tensors into reports, and everything else it says off."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def follow(tensors: list[Any], **_: Any) -> Iterator[Any]:
        for done, tensor in enumerate(tensors, start=1):
            yield tensor
            on_progress("convert", done, len(tensors))

    bar = vars(reader)["tqdm"]
    with warnings.catch_warnings(), quiet_transformers(logging.CRITICAL):
        warnings.simplefilter("ignore")
        try:
            vars(reader)["tqdm"] = follow
            yield
        finally:
            vars(reader)["tqdm"] = bar
