"""What answers lose, and how sure it is that one way of running them loses less than another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Losses:
    """Summed negative log-likelihood of answers, in nats, float64.

    Attributes:
        nats: The sum over each answer, under each set.
        tokens: How many each answer has.
    """

    nats: Float[Tensor, "rows sets"]
    tokens: Float[Tensor, " rows"]

    @classmethod
    def joined(cls, parts: Sequence["Losses"]) -> "Losses":
        """Those of several rows after one another."""
        return cls(torch.cat([p.nats for p in parts]), torch.cat([p.tokens for p in parts]))

    @property
    def mean(self) -> Float[Tensor, " sets"]:
        """Nats a token under each set."""
        return self.nats.sum(0) / self.tokens.sum()

    def behind(self, reference: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Nats a token that each set loses more than a reference, and the paired standard error.

        The error of a single answer is infinite: it tells nothing of others.

        Args:
            reference: Nats of each answer.
        """
        count = len(self.tokens)
        apart = self.nats - reference[:, None]
        mean = apart.sum(0) / self.tokens.sum()
        # Of a ratio of sums: answers are drawn, tokens come with them.
        rest = apart - mean * self.tokens[:, None]
        spread = rest.square().sum(0) * count / (count - 1) if count > 1 else mean + torch.inf
        return mean, spread.sqrt() / self.tokens.sum()

    def is_sure(self, gain: Tensor, error: Tensor, sure: float) -> Bool[Tensor, " sets"]:
        """Whether gains are above so many errors, of which few answers are a poor measure.

        The factor (n + 2) / n for n answers comes near to Student's t at two errors.
        """
        return gain > sure * (1 + 2 / len(self.tokens)) * error
