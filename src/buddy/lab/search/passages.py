"""Passages: token sequences of which some tokens alone are predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from buddy.data.examples import Example


@dataclass(frozen=True, slots=True)
class Passages:
    """Token sequences, and which of their tokens are predicted.

    Attributes:
        ids: Pads may follow the last target of a row.
        counted: Tokens, each row's first left out, that are targets; None = all.
    """

    ids: Int[Tensor, "rows tokens"]
    counted: Bool[Tensor, "rows targets"] | None = None

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted."""
        return self.ids[:, 1:].numel() if self.counted is None else int(self.counted.sum())

    def split(self, size: int) -> "list[Passages]":
        """Batches of some rows each, as wide as their last target."""
        if self.counted is None:
            return [Passages(ids) for ids in torch.split(self.ids, size)]
        batches = []
        for ids, counted in zip(
            torch.split(self.ids, size), torch.split(self.counted, size), strict=True
        ):
            width = int(counted.any(0).nonzero().max()) + 1
            batches.append(Passages(ids[:, : width + 1], counted[:, :width]))
        return batches


def answers_alone(examples: Sequence[Example]) -> Passages:
    """Prompts with their answers, of which the answers are predicted; the longest first."""
    rows = sorted(examples, key=lambda example: example.num_tokens, reverse=True)
    ids = torch.zeros(len(rows), rows[0].num_tokens, dtype=torch.long)
    counted = torch.zeros(len(rows), rows[0].num_tokens - 1, dtype=torch.bool)
    for row, example in enumerate(rows):
        ids[row, : example.num_tokens] = torch.tensor([*example.prompt, *example.answer])
        counted[row, len(example.prompt) - 1 : example.num_tokens - 1] = True
    return Passages(ids, counted)
