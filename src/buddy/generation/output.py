"""What a forward pass returns to its caller."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from buddy.depth.plan import DepthPlan
from buddy.engine.run import StepOutput
from buddy.engine.state.session import Session


@dataclass
class RoutedOutput(ModelOutput):
    """What transformers' causal LMs return, and what ran.

    Attributes:
        loss: Mean next-token cross-entropy, where labels were given.
        logits: [batch, kept columns, vocab].
        past_key_values: To continue from.
        plan: Which blocks each row's last new token ran.
        executed_blocks: [batch], how many they were, counted where they ran.
        lanes: What ran for every new token, pads left out.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Session | None = None
    plan: DepthPlan | None = None
    executed_blocks: Tensor | None = None
    lanes: StepOutput | None = None
