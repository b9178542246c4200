"""What makes passes over whole examples faster than those of the model as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

from buddy.backbone.backbone import Backbone
from buddy.training.adapters import fast_adapters
from buddy.training.attention import fast_attention


@contextmanager
def fast_passes(backbone: Backbone) -> Iterator[None]:
    """Let attention and LoRA layers compute by shorter ways, within the context."""
    with fast_attention(backbone), fast_adapters(backbone):
        yield
