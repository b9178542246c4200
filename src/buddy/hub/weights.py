"""The safetensors of a model's folder: which files they are, and whether they fit the config.

Their headers are read first. A config whose model would have other blocks, or more weights than
the files hold, is refused before anything of its size is made.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import torch

from buddy.backbone.families import find_family
from buddy.errors import CheckpointError, reason, shown
from buddy.hub.safe_paths import file_inside, find_inside, read_table
from buddy.hub.wrap_errors import explained

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
QUANTISED: Final = "quantised.safetensors"
"""What `hub.quantised_load` reads; by another name, so that nobody takes its bytes for numbers."""

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Number formats that weights are stored in, by their names in safetensors."""
STORED: Final = {**DTYPES, "I8": torch.int8, "U8": torch.uint8}
"""Those in fewer bits among them."""
_TOO_LARGE: Final = 2**60
"""Numbers of no tensor: their bytes must fit into 63 bits."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the model's weights: a single file, or those that the index names.

    Raises:
        CheckpointError: There are none, or the index is damaged or names anything but safetensors
            of this folder.
    """
    names = weight_names(folder)
    if names == [WEIGHTS] and find_inside(folder, WEIGHTS) is None:
        unsafe = sorted(path.name for path in folder.glob("*.bin"))
        others = f"found only {unsafe[0]}, which can run code when read" if unsafe else "found none"
        raise CheckpointError(
            f"{folder} has no weights that are safe to load: expected {WEIGHTS} or {INDEX}, "
            f"{others}; convert them with transformers' save_pretrained"
        )
    return [file_inside(folder, name) for name in names]


def weight_names(folder: Path) -> list[str]:
    """Names of the files that hold the model's weights, there or not; as `weight_files`.

    Raises:
        CheckpointError: The index is damaged, or names anything but safetensors of this folder, or
            not the single file that lies there too.
    """
    if find_inside(folder, INDEX) is None:
        is_quantised = find_inside(folder, QUANTISED) and not find_inside(folder, WEIGHTS)
        return [QUANTISED if is_quantised else WEIGHTS]
    places = read_table(folder, INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX} has no weight_map: fetch or copy the model again")
    for name in places.values():
        is_plain = isinstance(name, str) and "/" not in name and not name.startswith(".")
        if not is_plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX} names {str(name)[:200]!r} as a file of weights: expected plain "
                "names of *.safetensors in the same folder, not hidden; nothing else is read"
            )
    names = sorted(set(places.values()))
    if WEIGHTS not in names and find_inside(folder, WEIGHTS) is not None:
        raise CheckpointError(
            f"{folder} has {WEIGHTS}, and {INDEX} that names other files: delete the one that is "
            "not the model's"
        )
    return names


@contextmanager
def open_weights(folder: Path, *, is_quantised: bool = False) -> Iterator[dict[str, Any]]:
    """The tensors of all files by name, each read when it is asked for, until the block ends.

    Args:
        folder: Of the model.
        is_quantised: Whether weights may be stored in fewer bits.

    Raises:
        CheckpointError: A file is truncated or damaged, or holds anything but plain weights, or a
            shape that no tensor has; or two files hold a weight of one name.
    """
    from safetensors import SafetensorError, safe_open

    allowed = STORED if is_quantised else DTYPES
    with ExitStack() as files:
        tensors: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"the weights in {path} are truncated or damaged ({reason(error)}): copy or "
                    "fetch them again"
                ) from error
            twice = sorted(slices.keys() & tensors.keys())
            if twice:
                raise CheckpointError(
                    f"{path} holds {twice[0][:200]!r}, and so does another file of the index: "
                    "expected each weight in one file; fetch or copy the model again"
                )
            tensors |= slices
        for name, tensor in tensors.items():
            # A size of 0 hides the others from safetensors; torch multiplies them.
            if math.prod(size or 1 for size in tensor.get_shape()) >= _TOO_LARGE:
                raise CheckpointError(
                    f"the weights in {folder} are damaged: {shown(name, 200)[1:-1]} has a shape "
                    "that no tensor has; copy or fetch them again"
                )
            if tensor.get_dtype() not in allowed and not is_leftover(name):
                raise CheckpointError(
                    f"the weights in {folder} are no plain numbers: {shown(name, 200)[1:-1]} is "
                    f"stored as {tensor.get_dtype()}, expected {', '.join(DTYPES)}; load the model "
                    "that they were quantised from"
                )
        yield tensors


def read_header(file: Any) -> tuple[int, dict[str, Any]]:
    """Where the weights of a safetensors file begin, and what its header says of each.

    Args:
        file: Opened, or mapped, and checked by `open_weights`.
    """
    begins = 8 + int.from_bytes(file.read(8), "little")
    return begins, json.loads(file.read(begins - 8))


def is_leftover(name: str) -> bool:
    """Whether it is no weight: a buffer that older files carry, such as rotary frequencies."""
    return name.endswith("inv_freq")


def stored_dtypes(tensors: Mapping[str, Any]) -> list[torch.dtype]:
    """The number formats of all weights, each once; that of the first weight comes first."""
    weights = (tensor for name, tensor in tensors.items() if not is_leftover(name))
    return list(dict.fromkeys(DTYPES[weight.get_dtype()] for weight in weights))


def empty_model(config: Any) -> Any:
    """A model of that config on the meta device: all its parts, and no memory for weights.

    Raises:
        CheckpointError: transformers makes no model of the config.
    """
    from transformers import AutoModelForCausalLM

    advice = "correct it, or fetch or copy the model again"
    where = f"config.json of {config.name_or_path} describes no model"
    with explained(where, advice), torch.device("meta"):
        dtype = config.dtype or torch.bfloat16
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype)
        model.tie_weights()
    return model


def check_sizes(config: Any, tensors: Mapping[str, Any]) -> None:
    """Refuse a config that asks for more than the files hold.

    Raises:
        CheckpointError: It has another number of blocks, or its model more weights; or the files
            hold so many tensors that naming them all would take minutes.
    """
    blocks = re.compile(rf"(?:^|\.){find_family(config).blocks}\.(\d+)\.")
    numbers = {match[1] for name in tensors if (match := blocks.search(name))}
    where = f"the weights in {config.name_or_path} do not fit its config.json"
    if len(numbers) != config.num_hidden_layers:
        raise CheckpointError(
            f"{where}: they are of {len(numbers)} blocks, and it has num_hidden_layers "
            f"{config.num_hidden_layers}; fetch or copy the model again"
        )
    parameters = list(empty_model(config).parameters())
    # Experts, which are one parameter here, may be stored one by one, and in two parts.
    most = 2 * sum(len(parameter) if parameter.ndim == 3 else 1 for parameter in parameters)
    most += 16 + 2 * config.num_hidden_layers
    if len(tensors) > most:
        raise CheckpointError(
            f"{where}: they are {len(tensors):,} tensors, and a model of its sizes has at most "
            f"{most:,}; fetch or copy the model again"
        )
    wanted = sum(parameter.numel() for parameter in parameters)
    stored = sum(math.prod(tensor.get_shape()) for tensor in tensors.values())
    if wanted > stored:
        raise CheckpointError(
            f"{where}: they are {stored:,} numbers, and a model of its sizes has {wanted:,}; fetch "
            "or copy the model again"
        )
