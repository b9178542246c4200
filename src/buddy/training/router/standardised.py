"""A Decision Module that learns from standardised summaries, and is folded to be used.

A step of AdamW is as large as its rate, however large a weight is. Where deviations are folded into
the first layer before the first step, its weights are large, and steps hardly move them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buddy.routing.decision import DecisionModule
from buddy.training.summaries import Standard


class StandardisedInputs:
    """Stands before a Decision Module while it learns; its scores are what they were.

    Args:
        decision: Reads summaries as they are; from now on its first layer's weights are those for
            standardised ones.
        standard: What summaries are measured against.
    """

    def __init__(self, decision: DecisionModule, standard: Standard) -> None:
        self.standard = standard
        self._decision = decision
        self._hook = self._begin()
        standard.unfold(decision.down)

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Let the module read summaries as they are, within the context.

        Its weights are given back bit for bit.
        """
        down = self._decision.down
        learned = {name: value.clone() for name, value in down.state_dict().items()}
        self._hook.remove()
        self.standard.fold(down)
        try:
            yield
        finally:
            down.load_state_dict(learned)
            self._hook = self._begin()

    def _begin(self) -> torch.utils.hooks.RemovableHandle:
        return self._decision.register_forward_pre_hook(self._standardise)

    def _standardise(
        self, module: nn.Module, summaries: tuple[Float[Tensor, "batch summary"]]
    ) -> Float[Tensor, "batch summary"]:
        return self.standard(summaries[0])
