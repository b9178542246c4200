"""A Buddy checkpoint: what turns a base model into a routed one. Safetensors and JSON only.

    buddy.json            format, base model and its fingerprint, router config, policy, files
    routing.safetensors   router weights and prior
    adapter/              LoRA weights, as PEFT writes them (if any)
    backbone/             the base model's weights (only if they cannot be loaded from elsewhere)

Every file's size and SHA-256 stand in buddy.json and are checked before anything is used.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from buddy.engine.cache import KVPolicy
from buddy.engine.causal_lm import DEFAULT_KV_POLICY, BuddyForCausalLM
from buddy.errors import CheckpointError
from buddy.models.backbone import Backbone
from buddy.models.loading import load_model, load_prior
from buddy.models.progress import Progress
from buddy.routing.router import Router, RouterConfig

MANIFEST: Final = "buddy.json"
FORMAT: Final = 1
_SAMPLES: Final = 4096


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    policy: str | None = None,
    kv_policy: KVPolicy | None = None,
    attention: str = "sdpa",
    merge_adapter: bool = False,
    on_progress: Progress | None = None,
) -> BuddyForCausalLM:
    """Load a base model, or a Buddy checkpoint and the base model that it was made for.

    Args:
        name: Preset, hub id, folder, GGUF file or Buddy checkpoint.
        dtype: Of the backbone; by default as it was saved. The router stays in float32.
        device: By default the first CUDA device, else the CPU.
        policy: In place of the model's own.
        kv_policy: In place of the model's own.
        attention: "sdpa" or "eager".
        merge_adapter: Fold the LoRA weights into the backbone: faster, and no longer trainable.
        on_progress: Told what is being fetched or converted.

    Raises:
        ModelError: It cannot be found, fetched or understood.
        CheckpointError: It is truncated, foreign or unsafe.
    """
    folder = Path(name)
    if not (folder / MANIFEST).is_file():
        model = load_model(
            name, dtype=dtype, device=device, attention=attention, on_progress=on_progress
        )
        made = BuddyForCausalLM(
            model,
            prior=load_prior(name),
            policy=policy,
            kv_policy=kv_policy or DEFAULT_KV_POLICY,
        )
        made.source = str(name)
        return made
    manifest = read_manifest(folder)
    base = manifest["base"]
    source = str(folder / "backbone") if base["source"] is None else base["source"]
    model = load_model(
        source, dtype=dtype, device=device, attention=attention, on_progress=on_progress
    )
    _check_base(folder, base, Backbone(model))
    if (folder / "adapter").is_dir():
        model = _with_adapter(model, folder / "adapter", merge=merge_adapter)
    router, prior = _read_routing(folder, manifest)
    made = BuddyForCausalLM(
        model,
        prior=prior,
        router=None if router is None else router.to(model.device),
        policy=policy or manifest["policy"],
        kv_policy=kv_policy or manifest["kv_policy"],
    )
    made.source = base["source"]
    return made


def save(model: BuddyForCausalLM, folder: Path, *, include_backbone: bool | None) -> None:
    """Write a checkpoint under a temporary name, then rename it into place.

    Raises:
        CheckpointError: The folder holds something else, or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} holds files that are no Buddy checkpoint: name a new or an empty folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        include = model.source is None if include_backbone is None else include_backbone
        _write(model, staging, include_backbone=include)
        _swap(staging, folder)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error}; what was there before is intact"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(model: BuddyForCausalLM, folder: Path, *, include_backbone: bool) -> None:
    from safetensors.torch import save_file

    tensors = {}
    if model.prior is not None:
        tensors["prior"] = model.prior.contiguous().cpu()
    if model.router is not None:
        state = model.router.state_dict()
        tensors |= {f"router.{name}": t.contiguous().cpu() for name, t in state.items()}
    save_file(tensors, folder / "routing.safetensors")
    hf_model = cast(Any, model.model)
    if hasattr(hf_model, "peft_config"):
        hf_model.save_pretrained(folder / "adapter", safe_serialization=True)
    if include_backbone:
        _save_backbone(hf_model, folder / "backbone")
    manifest = {
        "format": FORMAT,
        "base": {
            "source": None if include_backbone else model.source,
            **_identity(model.backbone),
        },
        "router": None if model.router is None else model.router.config.to_json(),
        "policy": model.policy_spec,
        "kv_policy": model.kv_policy,
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


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
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    os.replace(folder, old)
    os.replace(staging, folder)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read buddy.json and check every file it names, by size and SHA-256.

    Raises:
        CheckpointError: It is damaged, of another format, or a file is missing or changed.
    """
    path = folder / MANIFEST
    try:
        manifest = cast(dict[str, Any], json.loads(path.read_text()))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']!r}, this version reads {FORMAT}: "
                "install the version of Buddy that wrote it"
            )
        recorded = {folder / name: entry for name, entry in manifest["files"].items()}
        missing = {"base", "router", "policy", "kv_policy"} - manifest.keys()
        if missing:
            raise KeyError(*sorted(missing))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): copy the checkpoint again") from error
    for file, entry in recorded.items():
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise CheckpointError(
                f"{file} {found}, expected {entry['bytes']:,} bytes: copy the checkpoint again"
            )
        if _digest(file) != entry["sha256"]:
            raise CheckpointError(f"{file} has been changed or damaged: copy the checkpoint again")
    return manifest


def _read_routing(folder: Path, manifest: dict[str, Any]) -> tuple[Router | None, Tensor | None]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / "routing.safetensors")
        prior = tensors.pop("prior", None)
        if manifest["router"] is None:
            return None, prior
        router = Router(RouterConfig.from_json(manifest["router"]))
        router.load_state_dict({name.removeprefix("router."): t for name, t in tensors.items()})
    except (SafetensorError, RuntimeError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the router in {folder} does not fit its description "
            f"({' '.join(str(error).split())}): copy the checkpoint again"
        ) from error
    return router.eval(), prior


def _with_adapter(model: nn.Module, folder: Path, *, merge: bool) -> Any:
    from peft import PeftModel

    if not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(
            f"{folder} has no adapter_model.safetensors: an adapter in another format is not read, "
            "as it could run code"
        )
    adapted = PeftModel.from_pretrained(model, str(folder))
    return adapted.merge_and_unload() if merge else adapted


def _identity(backbone: Backbone) -> dict[str, Any]:
    """What makes a base model this one: its sizes, and a fingerprint of its weights."""
    config = backbone.config
    return {
        "model_type": config.model_type,
        "num_blocks": backbone.num_blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "fingerprint": _fingerprint(backbone),
    }


def _fingerprint(backbone: Backbone) -> str:
    """SHA-256 of evenly spaced embedding weights; the same in bfloat16 and float32."""
    weights = backbone.embedding_weight.detach().flatten()
    sample = weights[:: max(1, len(weights) // _SAMPLES)].to(torch.bfloat16).cpu()
    return hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()


def _check_base(folder: Path, expected: dict[str, Any], backbone: Backbone) -> None:
    found = _identity(backbone)
    for key, value in found.items():
        if expected.get(key) != value:
            raise CheckpointError(
                f"{folder} was made for another base model: {key} is {expected.get(key)!r} there "
                f"and {value!r} in the model found; load the base model it names"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
