"""Cosine importance: how far a block turns the residual, its own or the one that comes out last."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.engine.influence import block_influence, summary_cosine


class _MeanOverTokens:
    """Shared by both: a weighted mean over batches."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._total = torch.zeros(backbone.num_blocks, dtype=torch.float64)
        self._weight = torch.zeros((), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        """Sums and their weight."""
        return {"total": self._total, "weight": self._weight}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._total, self._weight = state["total"], state["weight"]

    def scores(self) -> Float[Tensor, " blocks"]:
        """The mean, from 0 (the block does nothing) to 2."""
        return self._total / self._weight


class BlockInfluence(_MeanOverTokens):
    """Mean over tokens of `1 - cos(block input, block output)`; see `block_influence`."""

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in one batch of windows."""
        self._total += block_influence(self._backbone, ids)
        self._weight += ids.numel()


class SummaryCosine(_MeanOverTokens):
    """Mean over windows of `1 - cos` between summaries with and without a block.

    See `summary_cosine`.
    """

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in one batch of windows."""
        self._total += summary_cosine(self._backbone, ids)
        self._weight += len(ids)
