"""What makes passes over whole examples faster than those of the model as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from buddy.backbone.backbone import Backbone
from buddy.engine.executors.native.instructions import multiplies_bfloat16
from buddy.training.adapters import fast_adapters
from buddy.training.attention import fast_attention


@contextmanager
def fast_passes(backbone: Backbone) -> Iterator[None]:
    """Within it attention and LoRA layers compute what they always do, by shorter ways."""
    with fast_attention(backbone), fast_adapters(backbone):
        yield


def note_on_dtype(backbone: Backbone) -> list[str]:
    """What to say of a model that trains far slower than it could; nothing where it does not."""
    is_slow = backbone.dtype == torch.bfloat16 and backbone.device.type == "cpu"
    if not is_slow or multiplies_bfloat16():
        return []
    return [
        "this processor has no instructions for bfloat16, and training in it takes many times "
        "as long as in float32: consider --set model.dtype=float32"
    ]
