"""What makes passes over whole examples faster than those of the model as it is, or smaller."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from buddy.backbone.backbone import Backbone
from buddy.training.adapters import fast_adapters
from buddy.training.attention import fast_attention


@contextmanager
def fast_passes(backbone: Backbone, *, checkpointing: bool = False) -> Iterator[None]:
    """Let attention and LoRA layers compute by shorter ways, within the context.

    Args:
        backbone: Whose passes they are.
        checkpointing: Of what the backward pass needs, a block keeps its input alone and computes
            the rest again; the backward pass must be within, too.
    """
    with ExitStack() as stack:
        stack.enter_context(fast_attention(backbone))
        stack.enter_context(fast_adapters(backbone))
        if checkpointing:
            stack.enter_context(checkpointed_blocks(backbone))
        yield


@contextmanager
def checkpointed_blocks(backbone: Backbone) -> Iterator[None]:
    """Let blocks keep their input alone for the backward pass, within the context."""
    for block in backbone.blocks:
        block.forward = partial(_checkpointed, block.forward)
    try:
        yield
    finally:
        for block in backbone.blocks:
            del block.forward


def _checkpointed(forward: Callable[..., Any], hidden: Tensor, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden, **options)
    # The backward pass of a GPU has threads of its own, which do not know how tokens are packed.
    run = partial(copy_context().run, forward, **options)
    return checkpoint(run, hidden, use_reentrant=False)
