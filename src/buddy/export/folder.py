"""A folder that vLLM serves with the plugin of `packages/buddy-vllm`. Safetensors and JSON only.

    config.json           transformers' own, with the plugin's class among its architectures
    model*.safetensors    the weights, an adapter merged into them
    tokenizer files, generation_config.json, README.md (the model card, if any)
    buddy-export.json     how blocks are chosen, each file's size and SHA-256, and a revision
    buddy/routing.safetensors   token tables, heads and prior; see `export.routing`

vLLM takes every safetensors of the folder itself for weights, so the tables lie in one of their
own.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from buddy.backbone.quantised import is_quantised
from buddy.checkpoint.card import CARD, write_card
from buddy.checkpoint.listed_files import check_replaceable, describe_files
from buddy.checkpoint.manifest import identity
from buddy.errors import CheckpointError, FamilyError
from buddy.export.routing import check_exported, export_routing
from buddy.files import new_folder
from buddy.hub.config import CONFIG
from buddy.hub.loading import write_model
from buddy.hub.progress import OnFetch, silent
from buddy.model import BuddyForCausalLM

EXPORT_MANIFEST: Final = "buddy-export.json"
FORMAT: Final = 1
ROUTING: Final = "buddy/routing.safetensors"
ARCHITECTURES: Final = {"llama": "BuddyLlamaForCausalLM", "qwen2": "BuddyQwen2ForCausalLM"}
"""The plugin's class for each family that it serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    revision: str
    """SHA-256 of the manifest without this entry; it stands for every file."""
    policy: str
    num_blocks: int
    num_bytes: int
    """Size of all files."""
    has_predictor: bool
    """Whether requests may ask for budget `auto`."""


def check_exportable(model: BuddyForCausalLM) -> None:
    """Refuse a model that the plugin does not serve. Weights are not looked at.

    Raises:
        FamilyError: It is of another family, or has sliding windows.
        CheckpointError: Its adapters know the depth.
        PolicyError: Its policy chooses by more than token ids.
    """
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise FamilyError(
            f"a model of type {config.model_type!r} cannot be exported: expected one of "
            f"{', '.join(ARCHITECTURES)}; serve it with buddy serve"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise FamilyError(
            "a model with sliding windows cannot be exported: expected full attention in every "
            "block; serve it with buddy serve"
        )
    if model.depth_scales is not None:
        raise CheckpointError(
            "adapters that know the depth cannot be exported, as no plain weights compute what "
            "they do: serve the model with buddy serve, or train one without lora.depths"
        )
    check_exported(model)


def export_model(
    model: BuddyForCausalLM,
    folder: Path,
    *,
    tokenizer: Any,
    source: str,
    on_progress: OnFetch = silent,
) -> Exported:
    """Write the folder under a temporary name, then rename it into place.

    Args:
        model: An adapter must be merged.
        folder: Made, or replaced if it holds an earlier export.
        tokenizer: The model's.
        source: What the model was loaded by; a note for whoever reads the manifest.
        on_progress: Told of a measurement, and of bytes written.

    Raises:
        FamilyError: The plugin does not serve its family.
        PolicyError: Its policy chooses by more than token ids.
        CheckpointError: The adapter is not merged, or the weights are quantised; or the folder
            holds something else or cannot be written.
    """
    check_exportable(model)
    if is_quantised(model.model):
        raise CheckpointError(
            "weights in fewer bits cannot be exported: export the model that they were made from"
        )
    if hasattr(model.model, "peft_config"):
        raise CheckpointError(
            "weights with an adapter on them cannot be exported: load the model with "
            "merge_adapter=True"
        )
    check_free(folder)
    model.policy.prepare(on_progress)
    try:
        with new_folder(folder) as staging:
            revision = _write(model, staging, tokenizer, source, on_progress)
    except OSError as error:
        raise CheckpointError(
            f"the export {folder} cannot be written: {error}; what was there before is intact"
        ) from error
    return Exported(
        folder=folder,
        revision=revision,
        policy=model.policy.describe(),
        num_blocks=model.num_blocks,
        num_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        has_predictor=model.predictor is not None,
    )


def check_free(folder: Path) -> None:
    """Refuse a place that holds anything but an earlier export.

    Raises:
        CheckpointError: It does.
    """
    try:
        check_replaceable(folder, EXPORT_MANIFEST, "export of Buddy")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error


def _write(
    model: BuddyForCausalLM, folder: Path, tokenizer: Any, source: str, on_progress: OnFetch
) -> str:
    from safetensors.torch import save_file

    hf_model = cast(Any, model.model)
    weights = sum(weight.numel() * weight.element_size() for weight in hf_model.parameters())
    on_progress("export", 0, weights)
    tokenizer.save_pretrained(folder)
    write_model(hf_model, folder)
    on_progress("export", weights, weights)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["architectures"] = [ARCHITECTURES[model.config.model_type]]
    config["buddy"] = {"manifest": EXPORT_MANIFEST}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if model.card is not None:
        (folder / CARD).write_text(write_card(model.card), encoding="utf-8")
    routing = export_routing(model)
    # A file of no tensors is no safetensors that every reader takes.
    tensors = routing.tensors or {"prior": model.backbone.embedding.weight.new_zeros(0).float()}
    (folder / ROUTING).parent.mkdir()
    save_file(tensors, folder / ROUTING)
    contents = {
        "format": FORMAT,
        "model": {
            "source": source,
            **identity(model.backbone, model.base_fingerprint),
            "adapter": model.origin.merged_adapter,
        },
        **routing.description,
        "files": describe_files(folder),
    }
    revision = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    whole = json.dumps({**contents, "revision": revision}, indent=2)
    (folder / EXPORT_MANIFEST).write_text(whole + "\n")
    return revision
