"""Trained parts of methods for tiny models."""

import torch

from buddy import BuddyForCausalLM
from buddy.methods.gated.recipe import GateSettings
from buddy.methods.gated.run import make_part
from buddy.methods.pudding.policy import PuddingClassifier, PuddingConfig
from tests.tiny import NUM_BLOCKS, tiny_model

ORDERS = ((1, 2, 3, 4), (4, 3, 2, 1), (2, 4, 1, 3))


def random_pudding(*, width=16, orders=ORDERS, depths=(4,), seed=3, scale=3.0):
    """A classifier whose choice really depends on the input."""
    part = PuddingClassifier(
        PuddingConfig(num_blocks=NUM_BLOCKS, width=width, orders=orders, depths=depths, hidden=8)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in part.parameters():
            # Small biases: the prompt, not a constant, must decide.
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * (scale if parameter.ndim > 1 else 0.1))
    return part.eval()


def gated(method, *, seed=3, scale=0.5, engine="auto", **settings):
    """A model whose gates really differ from token to token and from block to block."""
    base = BuddyForCausalLM(tiny_model(), policy="full")
    part = make_part(method, GateSettings(penalty=1.0, width=8, **settings), base, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            if name == "bias":
                parameter.zero_()
            parameter.add_(torch.randn(parameter.shape, generator=draw) * scale)
    how = {"policy": part.policy, "kv_policy": part.leaves, "engine": engine}
    return BuddyForCausalLM(base.model, learned=part, **how)
