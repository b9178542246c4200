"""What a routing run measures: batches side by side, and a file of what is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from jaxtyping import Bool
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import ResultError
from buddy.model import BuddyForCausalLM
from buddy.resume import ResumeFile, fingerprint
from buddy.training.batches import rows_identity
from buddy.training.route.losses import Losses, batches, set_losses
from buddy.training.route.recipe import RouteRecipe
from buddy.training.route.workers import Workers
from buddy.training.run import Run


@dataclass(frozen=True, slots=True)
class Measurements:
    """The losses of a run's model.

    Attributes:
        run: Says where files lie, and is told how far it is.
        model: Whose losses they are.
        workers: Measure side by side.
    """

    run: Run[RouteRecipe]
    model: BuddyForCausalLM
    workers: Workers

    def measure(self, rows: Sequence[Example], sets: Bool[Tensor, "#rows sets blocks"]) -> Losses:
        """What some answers lose under some sets; ends where the run has been interrupted."""
        self.workers.check()
        return set_losses(self.model.backbone, rows, sets)

    def losses(
        self, what: str, examples: Sequence[Example], sets: Bool[Tensor, "rows sets blocks"]
    ) -> Losses:
        """What answers lose, each under sets of its own; batch by batch, from a file where done."""
        size = self.run.recipe.search.batch_size
        nats = torch.full(sets.shape[:2], torch.nan, dtype=torch.float64)
        tokens = torch.zeros(len(examples), dtype=torch.float64)
        file = ResumeFile(
            self.run.out / f"{what.replace(' ', '-')}.safetensors",
            {
                "rows": rows_identity(examples),
                "sets": fingerprint(sets),
                "size": size,
                "model": self.model.facts(),
                "dtype": str(self.model.dtype),
            },
        )
        try:
            before = file.read({"nats": nats, "tokens": tokens})
        except ResultError:
            self.run.warn([f"{what}: measured anew, as rows, settings or orders have changed"])
            before = None
        if before is not None:
            nats, tokens = before.tensors["nats"], before.tensors["tokens"]
        lock, listener = Lock(), self.run.listener

        def measure(batch: tuple[list[int], list[Example]]) -> None:
            places, part = batch
            lost = self.measure(part, sets[places])
            with lock:
                nats[places], tokens[places] = lost.nats, lost.tokens
                file.write_if_due(lambda: {"nats": nats, "tokens": tokens})
                listener.measured(what, int(tokens.count_nonzero()), len(examples))

        left = [b for b in batches(examples, size) if not bool(tokens[b[0]].all())]
        listener.measured(what, int(tokens.count_nonzero()), len(examples))
        self.workers.map(measure, left)
        file.write({"nats": nats, "tokens": tokens})
        return Losses(nats, tokens)
