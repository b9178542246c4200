"""What a forward pass returns to its caller."""

from dataclasses import InitVar, dataclass

from torch import Tensor
from transformers.utils.generic import ModelOutput

from buddy.depth.plan import DepthPlan
from buddy.engine.state.session import Session
from buddy.engine.step import StepOutput


@dataclass
class RoutedOutput(ModelOutput):
    """What transformers' causal LMs return, and what ran.

    As a mapping and as a tuple it holds the first three alone, so that transformers' tools, which
    gather and concatenate all that is in it, find what they know.

    Attributes:
        loss: Mean next-token cross-entropy, where labels were given.
        logits: [batch, kept columns, vocab].
        cache: To continue from.
        plan: Which blocks each row's last new token ran.
        executed_blocks: [batch], how many they were, counted where they ran.
        lanes: What ran for every new token, pads left out.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Session | None = None
    plan: InitVar[DepthPlan | None] = None
    executed_blocks: InitVar[Tensor | None] = None
    lanes: InitVar[StepOutput | None] = None

    def __post_init__(
        self,
        plan: DepthPlan | None,
        executed_blocks: Tensor | None,
        lanes: StepOutput | None,
    ) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.plan, self.executed_blocks, self.lanes = plan, executed_blocks, lanes
