"""A short name for a model's weights."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from buddy.backbone.memory import Release, keep
from buddy.backbone.quantised import QuantisedLinear

_SAMPLES: Final = 64
"""Weights of each parameter that the fingerprint looks at."""
_KEPT: Final = "_buddy_fingerprint"
"""Name under which a model keeps its fingerprint."""


def base_fingerprint(model: nn.Module, release: Release = keep) -> str:
    """SHA-256 of evenly spaced weights of every parameter, those of an adapter left out.

    Quantised layers count by their weights and scales.

    It is the same in bfloat16 and float32, and whether PEFT has wrapped the linear layers or not.
    In float16 it is the same only where the weights are stored in that format: it rounds others.

    Args:
        model: A Hugging Face causal LM, wrapped by PEFT or not.
        release: Told of each parameter that was looked at.
    """
    digest = hashlib.sha256()
    base = getattr(model, "get_base_model", lambda: model)()
    if (kept := getattr(base, _KEPT, None)) is not None:
        return str(kept)
    for name, parameter in (*base.named_parameters(), *_quantised(base)):
        if "lora_" in name:
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(name.replace(".base_layer", "").encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
        release(parameter)
    return digest.hexdigest()


def _quantised(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and scales of quantised layers, which are no parameters."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantisedLinear):
            yield from layer.named_buffers(name)


def keep_fingerprint(model: nn.Module, release: Release = keep) -> None:
    """Have a model keep the fingerprint that it has now, as its weights will not lie here whole.

    Args:
        model: As `base_fingerprint` takes it.
        release: The same.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    setattr(base, _KEPT, base_fingerprint(model, release))


def part_fingerprint(tensors: Mapping[str, Tensor], config: Any = None) -> str:
    """SHA-256 of all weights of a part beside the base model, such as a router, and its config.

    Args:
        tensors: By name.
        config: Plain JSON.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to(torch.float32).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def adapter_fingerprint(model: nn.Module) -> str | None:
    """SHA-256 of the adapter that PEFT has put on a model; None where there is none."""
    if not hasattr(model, "peft_config"):
        return None
    from peft import get_peft_model_state_dict

    # As a checkpoint of a bfloat16 model keeps them; in training they are float32.
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return part_fingerprint({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
