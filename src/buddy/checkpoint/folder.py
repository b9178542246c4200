"""A Buddy checkpoint: what turns a base model into a routed one. Safetensors and JSON only.

    buddy.json            format, base model and its fingerprint, configs, policy, files
    routing.safetensors   weights of router, predictor and ledger, and the prior
    README.md             the model card (if any)
    adapter/              LoRA weights, as PEFT writes them (if any)
    backbone/             the base model's weights (only if they cannot be loaded from elsewhere)

Every file's size and SHA-256 stand in buddy.json and are checked before anything is used. A file
that could be read and is not listed there is refused.
"""

from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import Quantisation, is_quantised, quantise_backbone
from buddy.checkpoint.adapter import (
    CONFIG,
    FOLDER,
    WEIGHTS,
    load_adapter,
    merge_adapter,
    save_adapter,
)
from buddy.checkpoint.card import CARD, read_card, write_card
from buddy.checkpoint.manifest import Manifest, check_base, check_policy, identity, read_manifest
from buddy.checkpoint.quick_prior import QuickPrior
from buddy.checkpoint.tensors import read_tensors
from buddy.depth.prior import Prior
from buddy.engine.executors.choice import EngineName
from buddy.engine.fork_guard import check_threads
from buddy.engine.state.cache import KVPolicy
from buddy.errors import CheckpointError
from buddy.files import new_folder
from buddy.hub.inspecting import model_without_weights
from buddy.hub.loading import (
    base_model,
    checkpoint_folder,
    is_stored_in,
    load_model,
    load_prior,
    model_folder,
)
from buddy.hub.manifest import MANIFEST, write_files
from buddy.hub.progress import Progress
from buddy.hub.wrap_errors import reason
from buddy.hub.writing import write_model
from buddy.model import DEFAULT_KV_POLICY, BuddyForCausalLM
from buddy.policies.learned import outline_part
from buddy.policies.searched import SearchedPolicy
from buddy.policies.static import StaticPolicy
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router

_ROUTING: Final = "routing.safetensors"
_PARTS: Final = ("router", "predictor", "ledger", "learned")


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
    check_threads()
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


def load_outline(
    name: str | Path,
    *,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    engine: EngineName = "auto",
    on_progress: Progress | None = None,
) -> BuddyForCausalLM:
    """What can be told of a model before its weights are fetched: blocks, context, policy, budgets.

    It refuses what the model itself would refuse, and runs nothing.

    Raises:
        BuddyError: As `load`, and as the model's constructor.
    """
    model = model_without_weights(name, on_progress=on_progress)
    folder = checkpoint_folder(name)
    routing: dict[str, Any] = {}
    fingerprint = None
    if folder is not None:
        manifest = read_manifest(folder)
        fingerprint = manifest.base.fingerprint
        routing = _read_routing(folder, manifest, Backbone(model))
        policy = policy or check_policy(folder, manifest)
        kv_policy = kv_policy or manifest.kv_policy
    else:
        routing["prior"] = load_prior(name)
    if routing.get("prior") is None:  # which is not measured: an outline runs nothing
        routing["prior"] = QuickPrior(Backbone(model), "", name)
    made = BuddyForCausalLM(
        model, **routing, policy="full", kv_policy=kv_policy or DEFAULT_KV_POLICY, engine=engine
    )
    made.source_fingerprint = fingerprint
    made.set_policy(policy or made.default_policy())
    return made


def _load(
    name: str | Path,
    options: dict[str, Any],
    policy: str | None,
    kv_policy: KVPolicy | None,
    is_merged: bool,
    engine: EngineName,
) -> BuddyForCausalLM:
    folder = checkpoint_folder(name)
    if folder is None:
        model = load_model(name, **options)
        fingerprint = base_fingerprint(model)
        made = BuddyForCausalLM(
            model,
            prior=load_prior(name) or QuickPrior(Backbone(model), fingerprint, name),
            policy="full",
            kv_policy=kv_policy or DEFAULT_KV_POLICY,
            engine=engine,
        )
        # A path is kept whole: the checkpoint may be loaded from another folder.
        # float16 rounds what is stored otherwise: such weights are nowhere to be loaded from.
        if made.dtype is not torch.float16 or is_stored_in(name, torch.float16):
            path = model_folder(name)
            made.source = str(name) if path is None or not path.exists() else str(path.resolve())
        made.source_fingerprint = fingerprint
        made.set_policy(policy or made.default_policy())
        return made
    manifest = read_manifest(folder)
    wanted = policy or check_policy(folder, manifest)
    model = load_model(base_model(folder), **options)
    backbone, fingerprint = Backbone(model), base_fingerprint(model)
    check_base(folder, manifest.base, backbone, fingerprint)
    routing, merged, weights = _read_routing(folder, manifest, backbone), None, fingerprint
    if any(name.startswith(f"{FOLDER}/") for name in manifest.files):
        _require_listed(folder, manifest, f"{FOLDER}/{WEIGHTS}", f"{FOLDER}/{CONFIG}")
        weights = f"{fingerprint}-{manifest.files[f'{FOLDER}/{WEIGHTS}'].sha256[:16]}"
        if is_merged:
            model, merged = merge_adapter(model, folder / FOLDER)
        else:
            model = load_adapter(model, folder / FOLDER)
    if "prior" not in routing:
        base = Backbone(getattr(model, "get_base_model", lambda: model)())
        routing["prior"] = QuickPrior(base, weights, name)
    made = BuddyForCausalLM(
        model,
        **routing,
        policy="full",
        kv_policy=kv_policy or manifest.kv_policy,
        engine=engine,
    )
    made.source, made.source_fingerprint = manifest.base.source, fingerprint
    made.merged_adapter = merged
    made.card = read_card(folder) if CARD in manifest.files else None
    # Last: a policy may have been made for another base model.
    made.set_policy(wanted)
    return made


def save(
    model: BuddyForCausalLM, folder: Path, *, include_backbone: bool | None, tokenizer: Any
) -> None:
    """Write a checkpoint under a temporary name, then rename it into place.

    Raises:
        CheckpointError: The folder holds something else or cannot be written, or the model could
            not be loaded again.
    """
    if is_quantised(model.model):
        raise CheckpointError(
            "only plain weights can be saved, and these have fewer bits: load the model without "
            "quant, and quantise it when the checkpoint is loaded"
        )
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
            "new, rounded to float16, merged or trained): leave include_backbone out, or set it to "
            "True"
        )
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{folder} holds files that are no Buddy checkpoint: name a new or an empty folder"
            )
        with new_folder(folder) as staging:
            _write(model, staging, include_backbone=include, tokenizer=tokenizer)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error}; what was there before is intact"
        ) from error


def _write(
    model: BuddyForCausalLM, folder: Path, *, include_backbone: bool, tokenizer: Any
) -> None:
    from safetensors.torch import save_file

    tensors = {}
    prior = model.resources.prior
    if prior is not None and prior.is_known:
        tensors["prior"] = prior.values().contiguous().cpu()
    for part in _PARTS:
        module = getattr(model, part)
        state = {} if module is None else module.state_dict()
        tensors |= {f"{part}.{name}": t.contiguous().cpu() for name, t in state.items()}
    save_file(tensors, folder / _ROUTING)
    hf_model = cast(Any, model.model)
    if hasattr(hf_model, "peft_config"):
        save_adapter(hf_model, folder / FOLDER, model.dtype, model.source)
    if include_backbone:
        _save_backbone(hf_model, folder / "backbone")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if model.card is not None:
        (folder / CARD).write_text(write_card(model.card), encoding="utf-8")
    contents = {
        "base": {
            "source": None if include_backbone else model.source,
            **identity(model.backbone, base_fingerprint(hf_model)),
        },
        "router": None if model.router is None else model.router.config.to_json(),
        "predictor": None if model.predictor is None else model.predictor.config.to_json(),
        "ledger": None if model.ledger is None else model.ledger.config.to_json(),
        "learned": None if model.learned is None else model.learned.to_json(),
        "policy": _policy_spec(model),
        "kv_policy": model.kv_policy,
    }
    write_files(folder, contents)


def _policy_spec(model: BuddyForCausalLM) -> str | None:
    """The policy's name; an order, or sets, that were read from a file are written in full."""
    policy = model.policy
    if isinstance(policy, SearchedPolicy):
        return policy.written()
    if isinstance(policy, StaticPolicy) and ":" in str(model.policy_spec) and policy.removal_order:
        return f"static:{','.join(map(str, policy.removal_order))}"
    return model.policy_spec


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


def _require_listed(folder: Path, manifest: Manifest, *names: str) -> None:
    missing = [name for name in names if name not in manifest.files]
    if missing:
        raise CheckpointError(
            f"{folder / MANIFEST} does not list {missing[0]}, and nothing else is read in its "
            "place, as it could run code: copy the checkpoint again"
        )


def _read_routing(folder: Path, manifest: Manifest, backbone: Backbone) -> dict[str, Any]:
    """Prior, router, predictor and a method's part, as many of them as the checkpoint has."""
    _require_listed(folder, manifest, _ROUTING)
    tensors = read_tensors(folder, _ROUTING)
    found: dict[str, Any] = {}
    if "prior" in tensors:
        values = _check_prior(folder, tensors["prior"], backbone.num_blocks)
        found["prior"] = Prior(values, "prior of the checkpoint")
    router, learned = manifest.router, manifest.learned
    if router is not None and router.token_width != backbone.kv_width:
        raise CheckpointError(
            f"{folder / MANIFEST}: the router reads {router.token_width} numbers a token, "
            f"and the base model has {backbone.kv_width}: copy the checkpoint again"
        )
    # Made without memory, so that a config cannot ask for more of it than the file holds.
    parts: dict[str, nn.Module] = {}
    with torch.device("meta"):
        if router is not None:
            parts["router"] = Router(router)
            if manifest.predictor is not None:
                parts["predictor"] = BudgetPredictor(router, manifest.predictor)
        if manifest.ledger is not None:
            parts["ledger"] = Ledger(manifest.ledger)
        if learned is not None:
            where = f"{folder / MANIFEST}: learned"
            parts["learned"] = outline_part(learned.policy, learned.settings, where)
    for name, module in parts.items():
        found[name] = _restore(folder, module, name, tensors).to(backbone.device)
    return found


def _check_prior(folder: Path, prior: Tensor, num_blocks: int) -> Tensor:
    if prior.shape != (num_blocks - 2,):
        raise CheckpointError(
            f"{folder / _ROUTING}: the prior has the shape {list(prior.shape)}, expected "
            f"[{num_blocks - 2}], a number for each block but the first and the last: copy the "
            "checkpoint again"
        )
    return prior


def _restore(folder: Path, module: nn.Module, part: str, tensors: dict[str, Tensor]) -> nn.Module:
    prefix = f"{part}."
    mine = {
        name.removeprefix(prefix): tensor.float().clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    try:
        module.load_state_dict(mine, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the {part} in {folder} does not fit its description ({reason(error)}): copy the "
            "checkpoint again"
        ) from error
    return module.eval()
