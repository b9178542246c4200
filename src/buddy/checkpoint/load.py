"""Loads a base model, or a Buddy checkpoint and the base model that it was made for, in parts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from buddy.backbone.backbone import Backbone
from buddy.backbone.depth_scales import DepthScales
from buddy.backbone.fingerprint import base_fingerprint
from buddy.backbone.memory import LargePages, Release, keep
from buddy.backbone.nf4 import FrozenFormat, freeze_in_nf4
from buddy.backbone.quantised import (
    Quantisation,
    StoredLayer,
    check_quantisation,
    quantisation_of,
    quantise_backbone,
    quantised_layer,
)
from buddy.checkpoint.adapter import (
    CONFIG,
    FOLDER,
    WEIGHTS,
    load_adapter,
    merge_adapter,
    read_adapter_config,
)
from buddy.checkpoint.adapter_scales import put_scales
from buddy.checkpoint.card import CARD, read_card
from buddy.checkpoint.listed_files import MANIFEST, check_file, check_files
from buddy.checkpoint.manifest import Manifest, check_base, check_policy, check_tokenizer
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
from buddy.hub.device import pick_device
from buddy.hub.loading import load_model, outline_model, stored_dtype
from buddy.hub.mapped_load import MappedWeights
from buddy.hub.noted import load_quickly, outline_quickly
from buddy.hub.progress import OnFetch
from buddy.hub.quantised_load import load_quantised
from buddy.hub.tokenizer import read_tokenizer
from buddy.hub.wrap_errors import reason
from buddy.policies.learned import outline_part
from buddy.routing.budget_predictor import BudgetPredictor
from buddy.routing.ledger import Ledger
from buddy.routing.router import Router


class WeightOptions(TypedDict, total=False):
    """How the base model's weights are loaded."""

    dtype: torch.dtype | None
    """Number format of the backbone; by default as it was saved. The router stays in float32."""
    device: str | torch.device | None
    """The first CUDA device by default, else the CPU. Several, "cuda:0,cuda:1", share the blocks;
    "auto" is all of CUDA."""
    attention: str | None
    """"sdpa" or "eager"; by default "sdpa", where it computes the family."""
    on_progress: OnFetch | None
    """Told what is being fetched or converted."""


class LoadOptions(WeightOptions, total=False):
    """How a model is loaded."""

    policy: str | None
    """Taken in place of the model's own, and so is the next."""
    kv_policy: KVPolicy | None
    merge_adapter: bool
    """Fold the LoRA weights into the backbone: faster, and no longer trainable."""
    quant: Quantisation | FrozenFormat | None
    """"int8" or "int4", weights alone; an adapter must be merged. Those that a GGUF file has in as
    many bits stay as they are. "nf4" is for adapters that are trained on it: see `backbone.nf4`."""


def load_parts(
    name: ModelName,
    *,
    only_runs: bool = False,
    mapped: MappedWeights | None = None,
    **options: Unpack[LoadOptions],
) -> ModelParts:
    """Load a base model, or a Buddy checkpoint and the base model that it was made for.

    Args:
        name: As `resolve` takes it.
        only_runs: The model is run by sessions, and nothing else is asked of it: a skeleton will
            do, where this machine knows the model.
        mapped: As `load_model` takes it.
        **options: How it is loaded.

    Raises:
        ModelError: It cannot be found, fetched or understood.
        FamilyError: Its family is not supported, or it is not computed as transformers does.
        CheckpointError: It is truncated, foreign or unsafe.
    """
    model = resolve(name)
    if _saved_quantisation(model, options.get("quant")) is not None:
        options["quant"] = None  # nothing is left to be done
        return _parts(model, load_quantised, **options)
    is_quick = only_runs and _is_merged_plainly(model)
    return _parts(model, load_quickly if is_quick else load_model, mapped=mapped, **options)


def _saved_quantisation(model: Resolved, asked: str | None) -> Quantisation | None:
    """How a checkpoint's own weights are quantised; None where they are plain.

    Raises:
        CheckpointError: They are to be quantised otherwise.
    """
    saved = None if model.checkpoint is None else model.checkpoint.manifest.base.quant
    if saved is not None and asked not in (None, saved):
        raise CheckpointError(
            f"the weights of {model.name} are saved in {saved}, got quant {asked!r}: leave it out, "
            "or quantise the model that they were made from"
        )
    return saved


def _is_merged_plainly(model: Resolved) -> bool:
    """Whether no adapter of a model needs PEFT to be merged."""
    checkpoint = model.checkpoint
    if checkpoint is None or f"{FOLDER}/{CONFIG}" not in checkpoint.manifest.files:
        return True
    if checkpoint.manifest.depth_scales is not None:
        return False
    check_file(checkpoint.folder, f"{FOLDER}/{CONFIG}", checkpoint.manifest.files)
    return read_adapter_config(checkpoint.folder / FOLDER).is_plain


def outline_parts(
    name: ModelName,
    *,
    only_runs: bool = False,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    on_progress: OnFetch | None = None,
) -> ModelParts:
    """Describe a model before its weights are fetched: blocks, context, policy, budgets.

    A model of these parts lies on the meta device. It refuses what the model itself would refuse,
    and runs nothing.

    Raises:
        BuddyError: As `load_parts`.
    """
    options: LoadOptions = {"policy": policy, "kv_policy": kv_policy, "on_progress": on_progress}
    return _parts(resolve(name), outline_quickly if only_runs else outline_model, **options)


def _parts(
    model: Resolved,
    load_base: Callable[..., Any],
    *,
    mapped: MappedWeights | None = None,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    merge_adapter: bool = False,
    quant: Quantisation | FrozenFormat | None = None,
    **weights: Unpack[WeightOptions],
) -> ModelParts:
    """Put a model's parts side by side, its base loaded by `load_base`."""
    checkpoint = model.checkpoint
    if quant is not None:  # before they reach a device, and without a copy of all of them
        device = pick_device(weights.get("device"))
        if quant != "nf4":
            check_quantisation(quant)
        mapped = mapped or MappedWeights()
        weights["device"] = "cpu"
    if mapped is not None:
        load_base = partial(load_base, mapped=mapped)
    release, pages = keep if mapped is None else mapped.release, LargePages()
    if checkpoint is None:
        parts = _base_parts(model, load_base(model.base, **weights), release)
    else:
        check_files(checkpoint.folder, checkpoint.manifest.files)
        policy = policy or check_policy(checkpoint.folder, checkpoint.manifest)
        hf_model = load_base(model.base, **weights)
        quantise = partial(_quantise_merged, hf_model, release, pages, quant)
        parts = _checkpoint_parts(model, checkpoint, hf_model, release, merge_adapter, quantise)
    if quant is not None:
        assert mapped is not None
        if quant == "nf4":
            freeze_in_nf4(parts.backbone, device, release)
        else:
            stored = _stored(model, parts)
            quantise_backbone(parts.backbone, quant, release, stored, pages)
        mapped.own(parts.hf_model)
        parts.hf_model.to(device)
    origin = replace(parts.origin, quant=quant or parts.origin.quant)
    return replace(parts, policy=policy, kv_policy=kv_policy or parts.kv_policy, origin=origin)


def _stored(model: Resolved, parts: ModelParts) -> StoredLayer:
    """What keeps the numbers of a GGUF file, where its weights are the model's."""
    gguf = model.base.gguf
    if gguf is None or parts.origin.merged_adapter is not None:
        return lambda *_: None
    from buddy.hub.gguf.blocks import stored_layers

    return stored_layers(gguf, parts.hf_model)


def _quantise_merged(
    model: Any,
    release: Release,
    pages: LargePages,
    quant: Quantisation | FrozenFormat | None,
    name: str,
) -> None:
    """Quantise a layer as soon as its adapter is merged; not the head, which comes last.

    Four bits of NF4 are made where the layer computes, once all are merged.
    """
    linear = model.get_submodule(name)
    if quant in ("int8", "int4") and linear is not model.get_output_embeddings():
        model.set_submodule(name, quantised_layer(linear, quant, release, pages))


def _base_parts(model: Resolved, hf_model: Any, release: Release) -> ModelParts:
    backbone, origin = Backbone(hf_model), Origin()
    if not _is_outline(backbone):
        # float16 rounds what is stored otherwise: such weights are nowhere to be loaded from.
        half = torch.float16
        is_stored = backbone.dtype is not half or stored_dtype(model.base) is half
        source = model.base.source if is_stored else None
        origin = Origin(source=source, fingerprint=base_fingerprint(hf_model, release))
    prior = shipped_prior(model.name) or QuickPrior(backbone, origin.fingerprint or "", model)
    return ModelParts(hf_model=hf_model, backbone=backbone, routing={"prior": prior}, origin=origin)


def _checkpoint_parts(
    model: Resolved,
    checkpoint: Checkpoint,
    hf_model: Any,
    release: Release,
    is_merged: bool,
    quantise: Callable[[str], None],
) -> ModelParts:
    folder, manifest = checkpoint.folder, checkpoint.manifest
    backbone, merged = Backbone(hf_model), None
    is_outline, saved = _is_outline(backbone), manifest.base.quant
    if not is_outline and saved != quantisation_of(hf_model):
        raise CheckpointError(
            f"{folder / MANIFEST} says that weights are saved in {saved}, and they are in "
            f"{quantisation_of(hf_model)}: copy the checkpoint again"
        )
    fingerprint = manifest.base.fingerprint
    if not is_outline:
        fingerprint = base_fingerprint(hf_model, release)
    check_base(folder, manifest.base, backbone, fingerprint)
    if manifest.base.fingerprint is None and not is_outline:
        check_tokenizer(folder, manifest.base, read_tokenizer(model.base.folder()))
    routing, measured = _read_routing(folder, manifest, backbone), fingerprint
    if any(name.startswith(f"{FOLDER}/") for name in manifest.files) and not is_outline:
        _require_listed(folder, manifest, f"{FOLDER}/{WEIGHTS}", f"{FOLDER}/{CONFIG}")
        measured = f"{fingerprint}-{manifest.files[f'{FOLDER}/{WEIGHTS}'].sha256[:16]}"
        if is_merged:
            hf_model, merged = merge_adapter(hf_model, folder / FOLDER, quantise)
        else:
            hf_model = load_adapter(hf_model, folder / FOLDER)
        if (scales := routing.get("depth_scales")) is not None:
            put_scales(hf_model, folder / FOLDER, scales, is_merged=is_merged)
    adapted = Backbone(base_of_adapted(hf_model))
    if "prior" not in routing:
        routing["prior"] = QuickPrior(adapted, measured or "", model)
    source = manifest.base.source
    return ModelParts(
        hf_model=hf_model,
        backbone=adapted,
        routing=routing,
        kv_policy=manifest.kv_policy,
        origin=Origin(
            source=source,
            fingerprint=fingerprint,
            merged_adapter=merged,
            quant=manifest.base.quant,
        ),
        card=read_card(folder) if CARD in manifest.files else None,
    )


def _is_outline(backbone: Backbone) -> bool:
    return backbone.device.type == "meta"


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
                predictor = BudgetPredictor(router, manifest.predictor)
                predictor.constant = manifest.constant
                parts["predictor"] = predictor
        if manifest.ledger is not None:
            parts["ledger"] = Ledger(manifest.ledger)
        if manifest.depth_scales is not None:
            _require_listed(folder, manifest, f"{FOLDER}/{WEIGHTS}", f"{FOLDER}/{CONFIG}")
            parts["depth_scales"] = DepthScales(manifest.depth_scales)
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
    state = {
        name.removeprefix(prefix): tensor.float().clone()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"the {part} in {folder} does not fit its description ({reason(error)}): copy the "
            "checkpoint again"
        ) from error
    return module.eval()
