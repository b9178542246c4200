"""What a routing run measures: answers under sets of blocks."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.data.examples import Example
from buddy.resume import fingerprint
from buddy.training.answer_losses import Losses
from buddy.training.measurements import Measurements
from buddy.training.route.losses import set_losses


class SetMeasurements(Measurements):
    """The losses of a run's model, under sets of blocks."""

    __slots__ = ()

    def measure(self, rows: Sequence[Example], sets: Bool[Tensor, "#rows sets blocks"]) -> Losses:
        """What some answers lose under some sets; ends where the run has been interrupted."""
        self.workers.check()
        return set_losses(self.model.backbone, rows, sets)

    def losses(
        self, what: str, examples: Sequence[Example], sets: Bool[Tensor, "rows sets blocks"]
    ) -> Losses:
        """What answers lose, each under sets of its own; batch by batch, from a file where done."""
        nats = self.nats(
            what,
            examples,
            (sets.shape[1],),
            {"sets": fingerprint(sets)},
            lambda part, places: self.measure(part, sets[places]).nats,
        )
        tokens = [len(row.answer) for row in examples]
        return Losses(nats, torch.tensor(tokens, dtype=torch.float64))
