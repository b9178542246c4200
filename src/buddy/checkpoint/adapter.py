"""The LoRA adapter of a checkpoint, in PEFT's own format; PEFT opens none of its files.

Its config may ask PEFT for much: to compute another base model's weights, to import packages, to
match names by any regular expression. What a LoRA adapter is made of is read here; anything else
must be as PEFT has it by default.
"""

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import torch
from torch import nn

from buddy.checkpoint.tensors import read_tensors
from buddy.errors import CheckpointError
from buddy.hub.foreign import explained
from buddy.hub.inside import read_table
from buddy.hub.quiet import quiet_peft
from buddy.settings import Range, build, check_ranges

FOLDER: Final = "adapter"
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"[\w.]{1,200}")
_NOT_READ: Final = frozenset(
    {
        *("base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        *("inference_mode", "init_lora_weights"),
    }
)
"""Where an adapter comes from and how it began; its weights are in the file."""


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


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json.

    Raises:
        CheckpointError: It is damaged, or of more than a LoRA adapter.
    """
    from peft import LoraConfig

    path = folder / CONFIG
    values = read_table(folder, CONFIG)
    known = {one.name for one in fields(AdapterConfig)}
    default: dict[str, Any] = cast(Any, LoraConfig()).to_dict()
    for name, value in values.items():
        other = name not in known and name not in _NOT_READ
        if other and value and value != default.get(name):
            raise CheckpointError(
                f"{path} sets {name[:80]}, which Buddy does not load: expected an adapter of plain "
                f"LoRA; merge it into its model, or save one without {name[:80]}"
            )
    mine = {name: value for name, value in values.items() if name in known}
    return build(AdapterConfig, mine, str(path), CheckpointError)


def load_adapter(model: nn.Module, folder: Path) -> Any:
    """Wrap a model by PEFT, with the adapter's weights.

    Raises:
        CheckpointError: The adapter is damaged, or is none for this model.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    config = read_adapter_config(folder)
    weights = read_tensors(folder, WEIGHTS)
    ranks = [len(one) for name, one in weights.items() if ".lora_A." in name and one.ndim == 2]
    wanted = max([config.r, *config.rank_pattern.values()])
    if wanted > max(ranks, default=0):
        raise CheckpointError(
            f"{folder / CONFIG} has rank {wanted:,}, and the adapter's weights have at most "
            f"{max(ranks, default=0):,}: copy the checkpoint again"
        )
    where = f"the adapter in {folder} does not fit its base model"
    with quiet_peft(), explained(where, "copy the checkpoint again"):
        values = {one.name: getattr(config, one.name) for one in fields(AdapterConfig)}
        lists = {name: list(one) for name, one in values.items() if isinstance(one, tuple)}
        del values["peft_type"]
        made = LoraConfig(**{**values, **lists}, inference_mode=True)
        with torch.random.fork_rng():
            adapted = get_peft_model(model, made).eval()
        result: Any = set_peft_model_state_dict(adapted, weights)
    missing = [name for name in result.missing_keys if ".lora_" in name]
    wrong = sorted([*missing, *result.unexpected_keys])
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} tensors are missing or unexpected, such as {wrong[0][:200]!r}; "
            "copy the checkpoint again"
        )
    return adapted


def save_adapter(hf_model: Any, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """As PEFT writes it, in the backbone's number format: that is what it will be added to.

    Raises:
        CheckpointError: It is of a kind that could not be loaded again.
    """
    from safetensors.torch import load_file, save_file

    # No adapter is on embeddings; left to itself, PEFT asks the hub whether they have changed.
    hf_model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    values = read_table(folder, CONFIG)
    values["base_model_name_or_path"] = source  # not the folder that it lay in on this machine
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    read_adapter_config(folder)
    weights = {name: one.to(dtype) for name, one in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
