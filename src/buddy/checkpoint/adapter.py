"""The LoRA adapter of a checkpoint, in PEFT's own format; PEFT opens none of its files.

Its config may ask PEFT for much: to compute another base model's weights, to import packages, to
match names by any regular expression. What a LoRA adapter is made of is read here; anything else
must be as PEFT has it by default.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from buddy.backbone.fingerprint import adapter_fingerprint, part_fingerprint
from buddy.checkpoint.tensors import read_tensors
from buddy.errors import CheckpointError
from buddy.hub.quiet import quiet_peft
from buddy.hub.safe_paths import read_table
from buddy.hub.wrap_errors import explained
from buddy.settings import Range, build, check_ranges

FOLDER: Final = "adapter"
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
"""Beginning of names of weights: PEFT's own modules around the model."""
_NAME: Final = re.compile(r"[\w.]{1,200}")
_NOT_READ: Final = frozenset(
    {
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        *("inference_mode", "init_lora_weights"),
        *("megatron_core", "qalora_group_size"),
    }
)
"""Where an adapter comes from and how it began, for its weights are in the file; and details of
what `megatron_config` and `use_qalora` turn on, which are refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """What of adapter_config.json is read."""

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    r: Annotated[int, Range(1, 4096)]
    lora_alpha: float
    target_modules: tuple[str, ...]
    exclude_modules: tuple[str, ...] | None = None
    lora_dropout: Annotated[float, Range(0, 1)] = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    fan_in_fan_out: bool = False
    use_rslora: bool = False
    use_dora: bool = False
    layers_to_transform: tuple[int, ...] | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self, CheckpointError)
        patterns = (*self.rank_pattern, *self.alpha_pattern)
        for name in (*self.target_modules, *(self.exclude_modules or ()), *patterns):
            if not _NAME.fullmatch(name):
                raise CheckpointError(f"{name[:200]!r} is no plain name of a layer")
        if not all(1 <= rank <= 4096 for rank in self.rank_pattern.values()):
            raise CheckpointError("rank_pattern: ranks must be at least 1 and at most 4,096")

    @property
    def is_plain(self) -> bool:
        """Whether each layer has the product of two matrices added, all scaled alike."""
        others = (self.use_dora, self.fan_in_fan_out, self.layers_to_transform is not None)
        return self.bias == "none" and not (any(others) or self.rank_pattern or self.alpha_pattern)

    @property
    def scaling(self) -> float:
        """Factor of the product of two matrices, where no pattern says otherwise."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def reaches(self, name: str) -> bool:
        """Whether a layer of this name has an adapter."""

        def is_named(names: tuple[str, ...]) -> bool:
            return any(name == layer or name.endswith(f".{layer}") for layer in names)

        return is_named(self.target_modules) and not is_named(self.exclude_modules or ())


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json.

    Raises:
        CheckpointError: It is damaged, or of more than a LoRA adapter.
    """
    path = folder / CONFIG
    values = read_table(folder, CONFIG)
    known = {entry.name for entry in fields(AdapterConfig)}
    for name, value in values.items():
        other = name not in known and name not in _NOT_READ
        if other and value and value != _defaults().get(name):
            raise CheckpointError(
                f"{path} sets {name[:80]}, which Buddy does not load: expected an adapter of plain "
                f"LoRA; merge it into its model, or save one without {name[:80]}"
            )
    settings = {name: value for name, value in values.items() if name in known}
    return build(AdapterConfig, settings, str(path), CheckpointError)


def _defaults() -> dict[str, Any]:
    from peft import LoraConfig

    defaults: dict[str, Any] = cast(Any, LoraConfig()).to_dict()
    return defaults


@torch.no_grad()
def merge_adapter(
    model: nn.Module, folder: Path, on_merged: Callable[[str], None] = lambda name: None
) -> tuple[Any, str | None]:
    """Add the adapter's weights to those of the model, as PEFT does, bit for bit.

    An adapter on a head whose weights are the embedding's gives the head weights of its own, so
    that the merged model computes what the adapted one does; PEFT would change the embedding too.

    Plain LoRA is added here, where the weights lie: PEFT takes seconds to be imported, to wrap each
    layer and to unwrap it. Anything else is left to PEFT.

    Args:
        model: Whose weights change.
        folder: Of the adapter.
        on_merged: Told the name of each layer that was merged here, and may put another in its
            place.

    Returns:
        The model, and the adapter's fingerprint.

    Raises:
        CheckpointError: The adapter is damaged, or is none for this model.
    """
    config = read_adapter_config(folder)
    _untie_head(model, config)
    if not config.is_plain:
        adapted = load_adapter(model, folder)
        fingerprint = adapter_fingerprint(adapted)  # of weights that merging takes away
        return adapted.merge_and_unload(), fingerprint
    weights = read_tensors(folder, WEIGHTS)
    _check_rank(folder, config, weights)
    wanted = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and config.reaches(name)
    }
    named = {f"{_PREFIX}{name}.lora_{side}.weight" for name in wanted for side in "AB"}
    _check_names(folder, sorted(named ^ weights.keys()))
    targets = {name: cast(Tensor, model.get_submodule(name).weight) for name in wanted}
    largest = max(weight.numel() for weight in targets.values())
    # New memory for each layer would take longer than the sums.
    like = next(iter(targets.values()))
    wide = torch.promote_types(like.dtype, torch.float32)
    sums, deltas = torch.empty(2, largest, dtype=wide, device=like.device)
    for name in sorted(wanted):
        weight = targets.pop(name)
        down, up = (weights[f"{_PREFIX}{name}.lora_{side}.weight"] for side in "AB")
        shape = (config.r, weight.shape[1]), (weight.shape[0], config.r)
        if (down.shape, up.shape) != shape:
            _check_names(folder, [f"{_PREFIX}{name}.lora_A.weight"])
        delta, total = (space[: weight.numel()].view(weight.shape) for space in (deltas, sums))
        torch.mm(up.to(like.device, wide), down.to(like.device, wide), out=delta)
        weight.copy_(total.copy_(weight).add_(delta.mul_(config.scaling)))
        on_merged(name)
    return model, part_fingerprint({name: t.to(torch.bfloat16) for name, t in weights.items()})


def _untie_head(model: Any, config: AdapterConfig) -> None:
    """Give the head weights of its own where they are the embedding's and the adapter is on it."""
    head = model.get_output_embeddings()
    is_adapted = any(
        layer is head and config.reaches(name) for name, layer in model.named_modules()
    )
    if is_adapted and head.weight is model.get_input_embeddings().weight:
        head.weight = nn.Parameter(head.weight.clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = False


def load_adapter(model: nn.Module, folder: Path) -> Any:
    """Wrap a model by PEFT, with the adapter's weights.

    Raises:
        CheckpointError: The adapter is damaged, or is none for this model.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config = read_adapter_config(folder)
    weights = read_tensors(folder, WEIGHTS)
    _check_rank(folder, config, weights)
    with quiet_peft(), explained(_misfit(folder), "copy the checkpoint again"):
        values = {entry.name: getattr(config, entry.name) for entry in fields(AdapterConfig)}
        lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        del values["peft_type"]
        lora = LoraConfig(**{**values, **lists}, inference_mode=True)
        with torch.random.fork_rng(devices=[]):  # it is made on the CPU
            adapted = get_peft_model(model, lora).eval()
        result: Any = set_peft_model_state_dict(adapted, weights)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    _check_names(folder, sorted([*missing, *result.unexpected_keys]))
    return adapted


def _misfit(folder: Path) -> str:
    return f"the adapter in {folder} does not fit its base model"


def _check_rank(folder: Path, config: AdapterConfig, weights: Mapping[str, Tensor]) -> None:
    ranks = [len(t) for name, t in weights.items() if ".lora_A." in name and t.ndim == 2]
    wanted = max([config.r, *config.rank_pattern.values()])
    if wanted > max(ranks, default=0):
        raise CheckpointError(
            f"{folder / CONFIG} has rank {wanted:,}, and the adapter's weights have at most "
            f"{max(ranks, default=0):,}: copy the checkpoint again"
        )


def _check_names(folder: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise CheckpointError(
            f"{_misfit(folder)}: {len(wrong)} tensors are missing or unexpected, such as "
            f"{wrong[0][:200]!r}; copy the checkpoint again"
        )


def save_adapter(hf_model: Any, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """Write an adapter as PEFT does, in the number format of the backbone that it is added to.

    Raises:
        CheckpointError: It is of a kind that could not be loaded again.
    """
    from safetensors.torch import load_file, save_file

    # No adapter is on embeddings; left to itself, PEFT asks the hub whether they have changed.
    hf_model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    values = read_table(folder, CONFIG)
    values["base_model_name_or_path"] = source  # not the folder that it lay in on this machine
    for names in (values["target_modules"], values["exclude_modules"]):
        if isinstance(names, list):
            names.sort()  # PEFT holds a set, in an order of each process's own
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    read_adapter_config(folder)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
