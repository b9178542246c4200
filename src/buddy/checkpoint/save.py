"""Writes a checkpoint under a temporary name, then renames it into place."""

from pathlib import Path
from typing import Any

from buddy.backbone.depth_scales import is_merged
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import is_quantised, quantisation_of
from buddy.checkpoint.adapter import FOLDER, save_adapter
from buddy.checkpoint.card import CARD, write_card
from buddy.checkpoint.listed_files import MANIFEST, check_replaceable
from buddy.checkpoint.manifest import identity, write_manifest
from buddy.checkpoint.parts import (
    MODULES,
    ROUTING_FILE,
    ModelParts,
    describe_module,
    trained_modules,
)
from buddy.checkpoint.resolve import BACKBONE_FOLDER
from buddy.depth.policy import Policy
from buddy.depth.prior import Prior
from buddy.errors import CheckpointError
from buddy.files import new_folder
from buddy.hub.loading import write_model
from buddy.hub.quantised_load import write_quantised
from buddy.policies.searched import SearchedPolicy
from buddy.policies.static import StaticPolicy


def save(parts: ModelParts, folder: Path, *, include_backbone: bool | None, tokenizer: Any) -> None:
    """Write a checkpoint.

    Raises:
        CheckpointError: The folder holds something else or cannot be written, or the model could
            not be loaded again.
    """
    if parts.policy is None:
        raise CheckpointError(
            "a policy that was given as an object cannot be written: name one with set_policy, "
            "such as routed or static, before saving"
        )
    if is_merged(parts.hf_model):
        raise CheckpointError(
            "merged adapters that know the depth cannot be saved, as no plain weights compute what "
            "they do: load the model without merge_adapter, and save that"
        )
    origin = parts.origin
    # What adapters were put on is still what it was when it was loaded.
    is_frozen = origin.quant == "nf4" and origin.merged_adapter is None
    fingerprint = origin.fingerprint if is_frozen else base_fingerprint(parts.hf_model)
    reloadable = origin.source is not None and fingerprint == origin.fingerprint
    include = not reloadable if include_backbone is None else include_backbone
    quant = quantisation_of(parts.hf_model)
    if quant is not None and include_backbone is not True:
        raise CheckpointError(
            f"the weights have fewer bits ({quant}), and are saved so only with "
            "include_backbone=True; for the plain ones load the model without quant"
        )
    if quant is None and is_quantised(parts.hf_model) and (include or not is_frozen):
        raise CheckpointError(
            "weights in fewer bits of NF4 cannot be saved: load the model without quant, and "
            "quantise it when the checkpoint is loaded"
        )
    if not include and not reloadable:
        raise CheckpointError(
            "the base model's weights were not loaded from a place that still has them (they are "
            "new, rounded to float16, merged or trained): leave include_backbone out, or set it to "
            "True"
        )
    base = {
        "source": None if include else origin.source,
        **identity(parts.backbone, fingerprint),
        **({} if quant is None else {"quant": quant}),  # older versions know no such key
    }
    try:
        check_replaceable(folder, MANIFEST, "Buddy checkpoint")
        with new_folder(folder) as staging:
            if quant is not None:
                write_quantised(parts.hf_model, staging / BACKBONE_FOLDER)
            elif include:
                _save_backbone(parts.hf_model, staging / BACKBONE_FOLDER)
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            _write(parts, staging, base)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error}; what was there before is intact"
        ) from error


def _write(parts: ModelParts, folder: Path, base: dict[str, Any]) -> None:
    """Write all but the backbone and the tokenizer; buddy.json last, as it lists what is there."""
    from safetensors.torch import save_file

    modules = trained_modules(parts.routing)
    tensors = {
        f"{part}.{name}": tensor.contiguous().cpu()
        for part, module in modules.items()
        for name, tensor in module.state_dict().items()
    }
    prior = parts.routing.get("prior")
    if isinstance(prior, Prior) and prior.is_known:
        tensors["prior"] = prior.values().contiguous().cpu()
    save_file(tensors, folder / ROUTING_FILE)
    if hasattr(parts.hf_model, "peft_config"):
        save_adapter(parts.hf_model, folder / FOLDER, parts.backbone.dtype, parts.origin.source)
    if parts.card is not None:
        (folder / CARD).write_text(write_card(parts.card), encoding="utf-8")
    configs = {name: describe_module(module) for name, module in modules.items()}
    # Older versions read no key that they do not know.
    always = dict.fromkeys(name for name in MODULES if name != "depth_scales")
    contents = {"base": base, **always, **configs}
    predictor = parts.routing.get("predictor")
    if predictor is not None and predictor.constant is not None:
        contents["constant"] = predictor.constant.to_json()
    write_manifest(folder, {**contents, "policy": parts.policy, "kv_policy": parts.kv_policy})


def written_policy(policy: Policy, spec: str | None) -> str | None:
    """The policy's name; an order, or sets, that were read from a file are written in full."""
    if isinstance(policy, SearchedPolicy):
        return policy.written()
    if isinstance(policy, StaticPolicy) and ":" in str(spec) and policy.removal_order:
        return f"static:{','.join(map(str, policy.removal_order))}"
    return spec


def _save_backbone(hf_model: Any, folder: Path) -> None:
    if not hasattr(hf_model, "peft_config"):
        write_model(hf_model, folder)
        return
    base = hf_model.get_base_model()
    # Inside a PEFT model every adapted linear layer is wrapped; write the plain weights.
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    write_model(base, folder, state_dict=plain)
