"""What a routing run measures: batches side by side, and a file of what is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from buddy.data.examples import Example
from buddy.errors import ResultError
from buddy.model import BuddyForCausalLM
from buddy.resume import ResumeFile, fingerprint
from buddy.training.batches import collate, rows_identity
from buddy.training.ledger.measure import Way
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
        nats = self._each(
            what,
            examples,
            (sets.shape[1],),
            {"sets": fingerprint(sets)},
            lambda part, places: self.measure(part, sets[places]).nats,
        )
        tokens = [len(row.answer) for row in examples]
        return Losses(nats, torch.tensor(tokens, dtype=torch.float64))

    def fed_losses(
        self, what: str, examples: Sequence[Example], ways: Sequence[Way], identity: dict[str, Any]
    ) -> Float[Tensor, "rows fed ways"]:
        """What each fed token of answers loses on the next, in nats; pads lose none.

        Args:
            what: Says what is measured; names its file.
            examples: Prompts and answers, of two tokens or more.
            ways: How deep the answers are fed.
            identity: What tells these ways from others, as plain values.
        """
        longest = max(len(row.answer) for row in examples) - 1

        def measure(part: Sequence[Example], places: Sequence[int]) -> Tensor:
            self.workers.check()
            batch = collate(part, self.model.device)
            lost = torch.stack([way.losses(batch, part) for way in ways], 2)
            return pad(lost, (0, 0, 0, longest - lost.shape[1]))

        return self._each(what, examples, (longest, len(ways)), identity, measure)

    def _each(
        self,
        what: str,
        examples: Sequence[Example],
        shape: Sequence[int],
        identity: dict[str, Any],
        measure: Callable[[Sequence[Example], list[int]], Tensor],
    ) -> Tensor:
        """Nats of every answer, batch by batch, side by side; from a file where done.

        Args:
            what: Says what is measured; names its file.
            examples: Prompts and answers.
            shape: Of those of one answer.
            identity: What they depend on beside answers and model.
            measure: Gives those of some answers, of which it is told the places.
        """
        size, listener = self.run.recipe.search.batch_size, self.run.listener
        nats = torch.full((len(examples), *shape), torch.nan, dtype=torch.float64)
        tokens = torch.zeros(len(examples), dtype=torch.float64)
        file = ResumeFile(
            self.run.out / f"{what.replace(' ', '-')}.safetensors",
            {
                "rows": rows_identity(examples),
                **identity,
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
        lock = Lock()

        def work(batch: tuple[list[int], list[Example]]) -> None:
            places, part = batch
            lost = measure(part, places)
            with lock:
                nats[places] = lost
                tokens[places] = torch.tensor([float(len(row.answer)) for row in part]).double()
                file.write_if_due(lambda: {"nats": nats, "tokens": tokens})
                listener.measured(what, int(tokens.count_nonzero()), len(examples))

        left = [b for b in batches(examples, size) if not bool(tokens[b[0]].all())]
        listener.measured(what, int(tokens.count_nonzero()), len(examples))
        self.workers.map(work, left)
        file.write({"nats": nats, "tokens": tokens})
        return nats
