"""Where a model's dtype makes passes over whole texts far slower than they could be."""

import torch

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.native.instructions import multiplies_bfloat16


def notes_on_dtype(backbone: Backbone) -> list[str]:
    """What to say of a model in bfloat16 on a processor that lacks it; nothing of others."""
    is_slow = backbone.dtype == torch.bfloat16 and backbone.device.type == "cpu"
    if not is_slow or multiplies_bfloat16():
        return []
    return [
        "this processor has no instructions for bfloat16, in which whole texts take many times "
        "as long as in float32: consider float32 (--dtype of a command, model.dtype of a recipe)"
    ]
