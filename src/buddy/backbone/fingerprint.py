"""A short name for a model's weights."""

import hashlib
from typing import Final

import torch
from torch import nn

_SAMPLES: Final = 64
"""Weights of each parameter that the fingerprint looks at."""


def base_fingerprint(model: nn.Module) -> str:
    """SHA-256 of evenly spaced weights of every parameter, those of an adapter left out.

    The same in bfloat16 and float32, and whether PEFT has wrapped the linear layers or not.
    """
    digest = hashlib.sha256()
    base = getattr(model, "get_base_model", lambda: model)()
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // _SAMPLES)].to(torch.bfloat16).cpu()
        digest.update(name.replace(".base_layer", "").encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
