"""Loads a base model, or a Buddy checkpoint and the base model that it was made for, in parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.quantised import Quantisation, quantise_backbone
from buddy.checkpoint.adapter import (
    CONFIG,
    FOLDER,
    WEIGHTS,
    load_adapter,
)
from buddy.checkpoint.adapter import (
    merge_adapter as add_adapter,
)
from buddy.checkpoint.card import CARD, read_card
from buddy.checkpoint.listed_files import MANIFEST, check_files
from buddy.checkpoint.manifest import Manifest, check_base, check_policy
from buddy.checkpoint.parts import (
    ROUTING_FILE,
    ModelParts,
    Origin,
    RoutingParts,
    base_of_adapted,
)
from buddy.checkpoint.quick_prior import QuickPrior, shipped_prior
from buddy.checkpoint.resolve import Checkpoint, ModelName, Resolved, resolve
from buddy.checkpoint.tensors import read_tensors
from buddy.depth.prior import Prior
from buddy.engine.state.cache import KVPolicy
from buddy.errors import CheckpointError
from buddy.hub.loading import is_stored_in, load_model, outline_model
from buddy.hub.progress import Progress
from buddy.hub.wrap_errors import reason
from buddy.policies.learned import outline_part
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router


class OutlineOptions(TypedDict, total=False):
    """Whatever a model is loaded for."""

    policy: str | None
    """In place of the model's own."""
    kv_policy: KVPolicy | None
    """In place of the model's own."""
    on_progress: Progress | None
    """Told what is being fetched or converted."""


class WeightOptions(TypedDict, total=False):
    """How the base model's weights are loaded."""

    dtype: torch.dtype | None
    """Of the backbone; by default as it was saved. The router stays in float32."""
    device: str | torch.device | None
    """By default the first CUDA device, else the CPU."""
    attention: str | None
    """"sdpa" or "eager"; by default "sdpa", where it computes the family."""
    on_progress: Progress | None
    """Told what is being fetched or converted."""


class LoadOptions(OutlineOptions, WeightOptions, total=False):
    """How a model is loaded."""

    merge_adapter: bool
    """Fold the LoRA weights into the backbone: faster, and no longer trainable."""
    quant: Quantisation | None
    """"int8" or "int4", weights alone; an adapter must be merged."""


def load_parts(
    name: ModelName,
    *,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    merge_adapter: bool = False,
    quant: Quantisation | None = None,
    **weights: Unpack[WeightOptions],
) -> ModelParts:
    """Load a base model, or a Buddy checkpoint and the base model that it was made for.

    Args:
        name: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        policy: As `LoadOptions` says; so do the next three.
        kv_policy: See there.
        merge_adapter: See there.
        quant: See there.
        **weights: As `WeightOptions` says.

    Raises:
        ModelError: It cannot be found, fetched or understood.
        FamilyError: Its family is not supported, or it is not computed as transformers does.
        CheckpointError: It is truncated, foreign or unsafe.
    """
    found = resolve(name)
    if found.checkpoint is None:
        parts = _load_base(found, load_model(found.base, **weights))
    else:
        parts = _load_checkpoint(found, found.checkpoint, policy, merge_adapter, weights)
    if quant is not None:
        quantise_backbone(parts.backbone, quant)
        parts = replace(parts, origin=replace(parts.origin, quant=quant))
    return _under(parts, policy, kv_policy)


def outline_parts(name: ModelName, **options: Unpack[OutlineOptions]) -> ModelParts:
    """What can be told of a model before its weights are fetched: blocks, context, policy, budgets.

    A model of these parts refuses what the model itself would refuse, and runs nothing.

    Raises:
        BuddyError: As `load_parts`.
    """
    policy, kv_policy = options.get("policy"), options.get("kv_policy")
    found = resolve(name)
    model = outline_model(found.base, on_progress=options.get("on_progress"))
    unmeasured = QuickPrior(Backbone(model), "", found)  # and it stays so: an outline runs nothing
    if found.checkpoint is None:
        prior = shipped_prior(found.name) or unmeasured
        parts = ModelParts(hf_model=model, routing={"prior": prior}, policy=None)
    else:
        folder, manifest = found.checkpoint.folder, found.checkpoint.manifest
        check_files(folder, manifest.files)
        parts = ModelParts(
            hf_model=model,
            routing={"prior": unmeasured, **_read_routing(folder, manifest, Backbone(model))},
            policy=policy or check_policy(folder, manifest),
            kv_policy=manifest.kv_policy,
            origin=Origin(fingerprint=manifest.base.fingerprint),
        )
    return _under(parts, policy, kv_policy)


def _under(parts: ModelParts, policy: str | None, kv_policy: KVPolicy | None) -> ModelParts:
    """The same parts, under the policies that are named."""
    chosen = policy or parts.policy, kv_policy or parts.kv_policy
    return replace(parts, policy=chosen[0], kv_policy=chosen[1])


def _load_base(found: Resolved, model: Any) -> ModelParts:
    backbone, fingerprint = Backbone(model), base_fingerprint(model)
    # float16 rounds what is stored otherwise: such weights are nowhere to be loaded from.
    is_stored = backbone.dtype is not torch.float16 or is_stored_in(found.base, torch.float16)
    prior = shipped_prior(found.name) or QuickPrior(backbone, fingerprint, found)
    return ModelParts(
        hf_model=model,
        routing={"prior": prior},
        policy=None,
        origin=Origin(source=found.base.source if is_stored else None, fingerprint=fingerprint),
    )


def _load_checkpoint(
    found: Resolved,
    checkpoint: Checkpoint,
    policy: str | None,
    is_merged: bool,
    weights: WeightOptions,
) -> ModelParts:
    folder, manifest = checkpoint.folder, checkpoint.manifest
    check_files(folder, manifest.files)
    policy = policy or check_policy(folder, manifest)
    model = load_model(found.base, **weights)
    backbone, fingerprint = Backbone(model), base_fingerprint(model)
    check_base(folder, manifest.base, backbone, fingerprint)
    routing, merged, measured = _read_routing(folder, manifest, backbone), None, fingerprint
    if any(name.startswith(f"{FOLDER}/") for name in manifest.files):
        _require_listed(folder, manifest, f"{FOLDER}/{WEIGHTS}", f"{FOLDER}/{CONFIG}")
        measured = f"{fingerprint}-{manifest.files[f'{FOLDER}/{WEIGHTS}'].sha256[:16]}"
        if is_merged:
            model, merged = add_adapter(model, folder / FOLDER)
        else:
            model = load_adapter(model, folder / FOLDER)
    if "prior" not in routing:
        routing["prior"] = QuickPrior(Backbone(base_of_adapted(model)), measured, found)
    return ModelParts(
        hf_model=model,
        routing=routing,
        policy=policy,
        kv_policy=manifest.kv_policy,
        origin=Origin(source=manifest.base.source, fingerprint=fingerprint, merged_adapter=merged),
        card=read_card(folder) if CARD in manifest.files else None,
    )


def _require_listed(folder: Path, manifest: Manifest, *names: str) -> None:
    missing = [name for name in names if name not in manifest.files]
    if missing:
        raise CheckpointError(
            f"{folder / MANIFEST} does not list {missing[0]}, and nothing else is read in its "
            "place, as it could run code: copy the checkpoint again"
        )


def _read_routing(folder: Path, manifest: Manifest, backbone: Backbone) -> RoutingParts:
    """Prior, router, predictor and a method's part, as many of them as the checkpoint has."""
    _require_listed(folder, manifest, ROUTING_FILE)
    tensors = read_tensors(folder, ROUTING_FILE)
    routing: dict[str, Any] = {}
    if "prior" in tensors:
        values = _check_prior(folder, tensors["prior"], backbone.num_blocks)
        routing["prior"] = Prior(values, "prior of the checkpoint")
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
        routing[name] = _restore(folder, module, name, tensors).to(backbone.device)
    return cast(RoutingParts, routing)


def _check_prior(folder: Path, prior: Tensor, num_blocks: int) -> Tensor:
    if prior.shape != (num_blocks - 2,):
        raise CheckpointError(
            f"{folder / ROUTING_FILE}: the prior has the shape {list(prior.shape)}, expected "
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
