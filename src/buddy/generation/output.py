"""What a forward pass returns to its caller."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from buddy.depth.plan import DepthPlan
from buddy.engine.state.session import Session


@dataclass
class RoutedOutput(ModelOutput):
    """What transformers' causal LMs return, and what ran.

    Attributes:
        loss: Mean next-token cross-entropy, where labels were given.
        logits: [batch, kept columns, vocab].
        past_key_values: To continue from.
        plan: Which blocks each row was to run.
        executed_blocks: [batch], how many each row ran, counted where they ran.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Session | None = None
    plan: DepthPlan | None = None
    executed_blocks: Tensor | None = None
