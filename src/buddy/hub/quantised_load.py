"""Models whose weights are saved in fewer bits: they load as they lie, and nothing is converted.

The folder has config.json, and safetensors in which a quantised layer has `weight` (int8, or uint8
of two weights each), `scales` and at times `minimums` and `units`, as `backbone.quantised` has
them. Its config says so under the key by which transformers knows weights that it cannot read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.families import Family, find_family
from buddy.backbone.quantised import GROUP, SUPER, QuantisedEmbedding, QuantisedLinear
from buddy.errors import CheckpointError, ModelError, shown
from buddy.hub.aligned_load import read_aligned
from buddy.hub.config import (
    BUDDYS_OWN,
    CONFIG,
    QUANTISATION,
    read_config,
    read_generation_config,
)
from buddy.hub.device import pick_device
from buddy.hub.loading import attention_of, check_whole, make_model, write_generation_config
from buddy.hub.place import ModelPlace
from buddy.hub.progress import OnFetch
from buddy.hub.quiet import quiet_transformers
from buddy.hub.verified import verify_once
from buddy.hub.weights import QUANTISED, check_sizes, open_weights
from buddy.hub.wrap_errors import explained

_WEIGHT: Final = ".weight"
_SCALES: Final = ".scales"
_MINIMUMS: Final = ".minimums"
_UNITS: Final = ".units"
_BESIDE: Final = (_SCALES, _MINIMUMS, _UNITS)
_ADVICE: Final = "copy the checkpoint again"


def write_quantised(model: Any, folder: Path) -> None:
    """Write a quantised model as it is: config, generation config and weights.

    Raises:
        CheckpointError: Its generation config was changed, and transformers does not write it.
        OSError: A file cannot be written.
    """
    from safetensors.torch import save_file

    backbone = Backbone(model)
    is_tied = isinstance(backbone.embedding, QuantisedEmbedding)
    model.config.tie_word_embeddings = is_tied
    begin = f"{_embedding_name(backbone.family)}."
    tensors = {
        name: tensor.contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if not (is_tied and name.startswith(begin))  # the output projection has them
    }
    write_generation_config(model, folder)
    values = {**model.config.to_dict(), QUANTISATION: BUDDYS_OWN}
    values.pop("_name_or_path", None)  # a path of this machine
    (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    save_file(tensors, folder / QUANTISED, metadata={"format": "pt"})


def load_quantised(
    place: ModelPlace,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    on_progress: OnFetch | None = None,
) -> Any:
    """Load a model that `write_quantised` wrote, and verify it if it is new.

    Args:
        place: Its folder.
        dtype: None, or the number format of what is not quantised.
        device: Where it is moved to; the first CUDA device by default, else the CPU.
        attention: As `load_model` takes it.
        on_progress: The same.

    Raises:
        ModelError: Another number format is asked for.
        CheckpointError: It is truncated, or its weights do not fit its config.
    """
    device, folder = pick_device(device), place.folder(on_progress)
    config = read_config(folder)
    attention = attention_of(config, attention)
    if dtype not in (None, config.dtype):
        raise ModelError(
            f"the weights in {folder} are saved in fewer bits beside numbers of {config.dtype}, "
            f"got dtype {dtype}: leave it out, or quantise the model that they were made from"
        )
    with open_weights(folder, is_quantised=True) as tensors:
        layers = _layers(folder, tensors)
        sizes = {f"{name}{_WEIGHT}": shape for name, shape in layers.items()}
        wide = {
            name: _Stored(sizes.get(name, tensor.get_shape()))
            for name, tensor in tensors.items()
            if not name.endswith(_BESIDE)
        }
        check_sizes(config, wide)
        with explained(f"the model in {folder} cannot be loaded", _ADVICE):
            state = read_aligned(folder, tensors)
    # What is not quantised, and in the place of every other weight one number of its shape.
    plain = {name: tensor for name, tensor in state.items() if name in wide and name not in sizes}
    stand_ins = {
        name: torch.zeros(1, dtype=config.dtype).expand(shape) for name, shape in sizes.items()
    }
    family = find_family(config)
    head = f"{family.head}{_WEIGHT}"
    if config.tie_word_embeddings and head in stand_ins:
        stand_ins[f"{_embedding_name(family)}{_WEIGHT}"] = stand_ins[head]
    with quiet_transformers(), explained(f"the model in {folder} cannot be loaded", _ADVICE):
        model, report = make_model(config, {**plain, **stand_ins}, config.dtype, attention)
    check_whole(folder, report)
    _put_in(folder, model, layers, state)
    model.config.name_or_path = str(folder)
    model.generation_config = read_generation_config(folder, config.vocab_size)
    model.eval()
    with explained(f"the model in {folder} cannot be run", _ADVICE):
        verify_once(model)
    return model.to(device)


_Numbers = tuple[str, list[int]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """What `check_sizes` asks of a tensor."""

    shape: Any

    def get_shape(self) -> Any:
        """Its sizes, in weights."""
        return self.shape


def _layers(folder: Path, tensors: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of each quantised layer, by name.

    Raises:
        CheckpointError: A weight has no scales, or what is beside it does not fit.
    """
    layers = {}
    for name, weight in tensors.items():
        numbers = weight.get_dtype()
        if numbers not in ("I8", "U8") or name.endswith(_BESIDE):
            continue
        layer, shape = name.removesuffix(_WEIGHT), weight.get_shape()
        found = tuple(
            None if part is None else (part.get_dtype(), part.get_shape())
            for part in (tensors.get(f"{layer}{end}") for end in _BESIDE)
        )
        rows, columns = shape if len(shape) == 2 else (0, 0)
        columns *= 1 if numbers == "I8" else 2
        if not rows * columns or found not in _fitting(numbers, rows, columns):
            raise _damaged(folder, layer)
        layers[layer] = (rows, columns)
    ends = ((name, end) for name in tensors for end in _BESIDE if name.endswith(end))
    if lost := sorted({name.removesuffix(end) for name, end in ends} - layers.keys()):
        raise _damaged(folder, lost[0])
    return layers


def _fitting(numbers: str, rows: int, columns: int) -> list[tuple[_Numbers | None, ...]]:
    """Number formats and shapes that scales, minimums and units may have beside a weight."""
    fitting: list[tuple[_Numbers | None, ...]] = []
    of_groups = [rows, columns // GROUP]
    if numbers == "I8":
        fitting.append((("F32", [rows]), None, None))
    if columns % GROUP == 0:
        fitting.append((("F32", of_groups), None, None))
    if columns % GROUP == 0 and numbers == "U8":
        fitting.append((("F16", of_groups), ("F16", of_groups), None))
    if columns % (SUPER * GROUP) == 0 and numbers == "U8":
        units = [rows, columns // GROUP // SUPER, 2]
        fitting.append((("U8", of_groups), ("U8", of_groups), ("F32", units)))
    return fitting


def _damaged(
    folder: Path, layer: str, wanted: str = "8 or 4 bits with scales and minimums"
) -> CheckpointError:
    return CheckpointError(
        f"the weights in {folder} are damaged: {shown(layer, 200)[1:-1]} has no weights in "
        f"{wanted} that fit them; {_ADVICE}"
    )


def _put_in(
    folder: Path, model: Any, layers: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Put quantised layers in the place of those that stand for them."""
    backbone = Backbone(model)
    embedding, head = backbone.embedding, backbone.head
    is_tied = head.weight is embedding.weight
    for name in layers:
        linear = model.get_submodule(name)
        if type(linear) is not nn.Linear:
            raise _damaged(folder, name)
        weight, scales = state[f"{name}{_WEIGHT}"], state[f"{name}{_SCALES}"]
        minimums, units = (state.get(f"{name}{end}") for end in (_MINIMUMS, _UNITS))
        made = QuantisedLinear(weight, scales, minimums, linear.bias, units)
        if linear is head:
            if made.quantisation != "int8":  # as token ids are embedded by its rows
                raise _damaged(folder, name, "8 bits with scales")
            ours = QuantisedEmbedding(embedding, made) if is_tied else embedding
            backbone.set_ends(ours, made)
        else:
            model.set_submodule(name, made)


def _embedding_name(family: Family) -> str:
    return f"{family.backbone}.{family.embedding}"
