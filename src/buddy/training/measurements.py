"""What a run measures of its answers: batches side by side, and a file of what is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from buddy.data.examples import Example
from buddy.errors import ResultError
from buddy.model import BuddyForCausalLM
from buddy.resume import ResumeFile
from buddy.training.batches import by_length, rows_identity
from buddy.training.run import Run
from buddy.training.workers import Workers


@dataclass(frozen=True, slots=True)
class Measurements:
    """The losses of a run's model.

    Attributes:
        run: Says where files lie, and is told how far it is.
        model: Whose losses they are.
        workers: Measure side by side.
        size: Answers of a batch.
    """

    run: Run[Any]
    model: BuddyForCausalLM
    workers: Workers
    size: int

    def nats(
        self,
        what: str,
        examples: Sequence[Example],
        shape: Sequence[int],
        identity: dict[str, Any],
        measure: Callable[[Sequence[Example], list[int]], Tensor],
    ) -> Tensor:
        """Nats of every answer, batch by batch, side by side; from a file where done.

        It ends where the run has been interrupted.

        Args:
            what: Says what is measured; names its file.
            examples: Prompts and answers.
            shape: Of those of one answer.
            identity: What they depend on beside answers and model.
            measure: Gives those of some answers, of which it is told the places.
        """
        listener = self.run.listener
        nats = torch.full((len(examples), *shape), torch.nan, dtype=torch.float64)
        tokens = torch.zeros(len(examples), dtype=torch.float64)
        file = ResumeFile(
            self.run.out / f"{what.replace(' ', '-')}.safetensors",
            {
                "rows": rows_identity(examples),
                **identity,
                "size": self.size,
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
            self.workers.check()
            lost = measure(part, places)
            with lock:
                nats[places] = lost
                tokens[places] = torch.tensor([float(len(row.answer)) for row in part]).double()
                file.write_if_due(lambda: {"nats": nats, "tokens": tokens})
                listener.measured(what, int(tokens.count_nonzero()), len(examples))

        left = [b for b in by_length(examples, self.size) if not bool(tokens[b[0]].all())]
        listener.measured(what, int(tokens.count_nonzero()), len(examples))
        self.workers.map(work, left)
        file.write({"nats": nats, "tokens": tokens})
        return nats
