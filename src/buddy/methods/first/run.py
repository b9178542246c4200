"""FiRST's training: its routers first, then adapters under them."""

from dataclasses import replace
from typing import Final

from buddy.methods.gated.run import GATED, GatedTrainer
from buddy.training.schedule import learning_rate_share


class FirstTrainer(GatedTrainer):
    """Takes the steps of two stages; in each, what the other one trains rests."""

    @property
    def router_steps(self) -> int:
        """Steps of the first stage."""
        return round(self.recipe.gates.gate_steps * self.steps)

    def adapts(self, step: int) -> bool:
        """Whether a step trains adapters under frozen routers."""
        return step >= self.router_steps

    def rate_share(self, step: int, place: int) -> float:
        """The share of a group's peak learning rate; either stage has a schedule of its own."""
        is_adapters = place == 0 and self.recipe.lora.rank > 0
        if is_adapters != self.adapts(step):
            return 0.0
        begun, ends = (
            (self.router_steps, self.steps) if self.adapts(step) else (0, self.router_steps)
        )
        return learning_rate_share(self.recipe.optim, step - begun, ends - begun)


train_first: Final = replace(GATED, trainer=FirstTrainer).train
"""Trains FiRST by a recipe."""
