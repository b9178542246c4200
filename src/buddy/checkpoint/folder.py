"""A Buddy checkpoint: what turns a base model into a routed one. Safetensors and JSON only.

    buddy.json            format, base model and its fingerprint, configs, policy, files
    routing.safetensors   weights of router and predictor, and the prior
    adapter/              LoRA weights, as PEFT writes them (if any)
    backbone/             the base model's weights (only if they cannot be loaded from elsewhere)

Every file's size and SHA-256 stand in buddy.json and are checked before anything is used.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import Quantisation, quantise_backbone
from buddy.checkpoint.manifest import (
    MANIFEST,
    check_base,
    identity,
    read_manifest,
    write_manifest,
)
from buddy.checkpoint.quick_prior import QuickPrior
from buddy.depth.prior import Prior
from buddy.engine.executors.choice import EngineName
from buddy.engine.state.cache import KVPolicy
from buddy.errors import CheckpointError
from buddy.hub.loading import load_model, load_prior, shipped_checkpoint
from buddy.hub.progress import Progress
from buddy.hub.quiet import quiet_peft
from buddy.model import DEFAULT_KV_POLICY, BuddyForCausalLM
from buddy.routing.budget_predictor import BudgetPredictor, BudgetPredictorConfig
from buddy.routing.router import Router, RouterConfig


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    attention: str | None = None,
    merge_adapter: bool = False,
    engine: EngineName = "auto",
    quant: Quantisation | None = None,
    on_progress: Progress | None = None,
) -> BuddyForCausalLM:
    """Load a base model, or a Buddy checkpoint and the base model that it was made for.

    Args:
        name: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        dtype: Of the backbone; by default as it was saved. The router stays in float32.
        device: By default the first CUDA device, else the CPU.
        policy: In place of the model's own.
        kv_policy: In place of the model's own.
        attention: "sdpa" or "eager"; by default "sdpa", where it computes the family.
        merge_adapter: Fold the LoRA weights into the backbone: faster, and no longer trainable.
        engine: "native", "general" or "auto".
        quant: "int8" or "int4", weights alone; an adapter must be merged.
        on_progress: Told what is being fetched or converted.

    Raises:
        ModelError: It cannot be found, fetched or understood.
        FamilyError: Its family is not supported, or it is not computed as transformers does.
        CheckpointError: It is truncated, foreign or unsafe.
    """
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "on_progress": on_progress,
    }
    made = _load(name, options, policy, kv_policy, merge_adapter, engine)
    if quant is not None:
        quantise_backbone(made.backbone, quant)
        made.quant = quant
    return made


def _load(
    name: str | Path,
    options: dict[str, Any],
    policy: str | None,
    kv_policy: KVPolicy | None,
    merge_adapter: bool,
    engine: EngineName,
) -> BuddyForCausalLM:
    shipped = shipped_checkpoint(name)
    folder = shipped or Path(name).expanduser()
    if not (folder / MANIFEST).is_file():
        model = load_model(name, **options)
        fingerprint = base_fingerprint(model)
        made = BuddyForCausalLM(
            model,
            prior=load_prior(name) or QuickPrior(Backbone(model), fingerprint, name),
            policy=policy,
            kv_policy=kv_policy or DEFAULT_KV_POLICY,
            engine=engine,
        )
        # A path is kept whole: the checkpoint may be loaded from another folder.
        made.source = str(folder.resolve()) if folder.exists() else str(name)
        made.source_fingerprint = fingerprint
        return made
    manifest = read_manifest(folder)
    source = manifest["base"]["source"]
    model = load_model(source or folder / "backbone", **options)
    fingerprint = base_fingerprint(model)
    check_base(folder, manifest["base"], identity(Backbone(model), fingerprint))
    weights = fingerprint
    if any(name.startswith("adapter/") for name in manifest["files"]):
        model = _with_adapter(model, folder / "adapter", merge=merge_adapter)
        adapter = manifest["files"]["adapter/adapter_model.safetensors"]
        weights = f"{fingerprint}-{adapter['sha256'][:16]}"
    routing = _read_routing(folder, manifest, model.device)
    if "prior" not in routing:
        base = Backbone(getattr(model, "get_base_model", lambda: model)())
        routing["prior"] = QuickPrior(base, weights, name)
    made = BuddyForCausalLM(
        model,
        **routing,
        policy=policy or manifest["policy"],
        kv_policy=kv_policy or manifest["kv_policy"],
        engine=engine,
    )
    made.source, made.source_fingerprint = source, fingerprint
    return made


def save(
    model: BuddyForCausalLM, folder: Path, *, include_backbone: bool | None, tokenizer: Any
) -> None:
    """Write a checkpoint under a temporary name, then rename it into place.

    Raises:
        CheckpointError: The folder holds something else or cannot be written, or the model could
            not be loaded again.
    """
    if model.policy_spec is None:
        raise CheckpointError(
            "a policy that was given as an object cannot be written: name one with set_policy, "
            "such as routed or static, before saving"
        )
    reloadable = model.source is not None and (
        base_fingerprint(model.model) == model.source_fingerprint
    )
    include = not reloadable if include_backbone is None else include_backbone
    if not include and not reloadable:
        raise CheckpointError(
            "the base model's weights were not loaded from a place that still has them (they are "
            "new, merged or trained): leave include_backbone out, or set it to True"
        )
    staging = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{folder} holds files that are no Buddy checkpoint: name a new or an empty folder"
            )
        staging.mkdir(parents=True)
        _write(model, staging, include_backbone=include, tokenizer=tokenizer)
        _swap(staging, folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error}; what was there before is intact"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(
    model: BuddyForCausalLM, folder: Path, *, include_backbone: bool, tokenizer: Any
) -> None:
    from safetensors.torch import save_file

    tensors = {}
    prior = model.resources.prior
    if prior is not None and prior.is_known:
        tensors["prior"] = prior.values().contiguous().cpu()
    for part in ("router", "predictor"):
        module = getattr(model, part)
        state = {} if module is None else module.state_dict()
        tensors |= {f"{part}.{name}": t.contiguous().cpu() for name, t in state.items()}
    save_file(tensors, folder / "routing.safetensors")
    hf_model = cast(Any, model.model)
    if hasattr(hf_model, "peft_config"):
        _save_adapter(hf_model, folder / "adapter", model.dtype, model.source)
    if include_backbone:
        _save_backbone(hf_model, folder / "backbone")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    contents = {
        "base": {
            "source": None if include_backbone else model.source,
            **identity(model.backbone, base_fingerprint(hf_model)),
        },
        "router": None if model.router is None else model.router.config.to_json(),
        "predictor": None if model.predictor is None else model.predictor.config.to_json(),
        "policy": model.policy_spec,
        "kv_policy": model.kv_policy,
    }
    write_manifest(folder, contents)
    # safetensors writes for the owner alone; the rest follows the user's umask.
    for path in folder.rglob("*.safetensors"):
        path.chmod((folder / MANIFEST).stat().st_mode)


def _save_adapter(hf_model: Any, folder: Path, dtype: torch.dtype, source: str | None) -> None:
    """As PEFT writes it, in the backbone's number format: that is what it will be added to."""
    from safetensors.torch import load_file, save_file

    hf_model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    config = folder / "adapter_config.json"
    values = json.loads(config.read_text())
    values["base_model_name_or_path"] = source  # not the folder that it lay in on this machine
    config.write_text(json.dumps(values, indent=2) + "\n")
    path = folder / "adapter_model.safetensors"
    weights = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def _save_backbone(hf_model: Any, folder: Path) -> None:
    if not hasattr(hf_model, "peft_config"):
        hf_model.save_pretrained(folder)
        return
    base = hf_model.get_base_model()
    # Inside a PEFT model every adapted linear layer is wrapped; write the plain weights.
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    base.save_pretrained(folder, state_dict=plain)


def _swap(staging: Path, folder: Path) -> None:
    """Put the finished folder in place; an older checkpoint stays until the new one is there."""
    if not folder.exists():
        os.replace(staging, folder)
        return
    old = staging.with_name(f"{staging.name}.old")
    os.replace(folder, old)
    try:
        os.replace(staging, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _read_routing(folder: Path, manifest: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Prior, router and predictor, as many of them as the checkpoint has."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    try:
        tensors = load_file(folder / "routing.safetensors")
        if "prior" in tensors:
            found["prior"] = Prior(tensors["prior"], "prior of the checkpoint")
        if manifest["router"] is not None:
            router = Router(RouterConfig.from_json(manifest["router"]))
            found["router"] = _restore(router, "router.", tensors, device)
        # Checkpoints older than the predictor say nothing of one.
        if manifest.get("predictor") is not None:
            size = BudgetPredictorConfig(**manifest["predictor"])
            predictor = BudgetPredictor(RouterConfig.from_json(manifest["router"]), size)
            found["predictor"] = _restore(predictor, "predictor.", tensors, device)
    except (SafetensorError, RuntimeError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the router or the predictor in {folder} does not fit its description "
            f"({' '.join(str(error).split())}): copy the checkpoint again"
        ) from error
    return found


def _restore(
    module: nn.Module, prefix: str, tensors: dict[str, Tensor], device: torch.device
) -> nn.Module:
    mine = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    module.load_state_dict(mine)
    return module.eval().to(device)


def _with_adapter(model: nn.Module, folder: Path, *, merge: bool) -> Any:
    from peft import PeftModel

    if not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(
            f"{folder} has no adapter_model.safetensors: an adapter in another format is not read, "
            "as it could run code"
        )
    with quiet_peft():
        adapted = PeftModel.from_pretrained(model, str(folder))
    return adapted.merge_and_unload() if merge else adapted
