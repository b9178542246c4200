"""Runs the blocks of one pass: each by the requests that are to run it.

In a block that some requests skip, the rows of the others are gathered, attend with metadata of
their own, and are scattered back. Where all agree nothing is copied.
"""

from itertools import islice
from typing import Any

import torch

from buddy_vllm.batch import Batch, Group


def run_blocks(
    stack: Any,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    batch: Batch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this stage's blocks; a row that skips one leaves it as it came.

    Args:
        stack: Has `layers`, `start_layer` and `end_layer`.
        positions: [tokens].
        hidden: [tokens, hidden], what is to be added to the residual.
        residual: [tokens, hidden]; None before the first block, where `hidden` is the residual.
        batch: Who runs what.

    Returns:
        `hidden` and `residual` after the blocks; their sum is the residual stream.
    """
    rows = _Rows(positions, hidden, residual)
    layers = islice(stack.layers, stack.start_layer, stack.end_layer)
    for block, layer in enumerate(layers, stack.start_layer):
        if batch.is_idle(block):
            continue
        group = batch.group(block)
        rows.take(group)
        if group is None:
            rows.run(layer)
        else:
            with batch.attention.only(layer, group):
                rows.run(layer)
        batch.count(slice(block, block + 1))
    return rows.whole()


class _Rows:
    """The residual stream, and the part of it that is taken out for a group of requests.

    Neighbouring blocks that the same requests run cost no copy between them.
    """

    def __init__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        self._positions, self._hidden, self._residual = positions, hidden, residual
        self._group: Group | None = None
        self._part = positions, hidden, residual

    def take(self, group: Group | None) -> None:
        """Have `run` run the rows of these requests; None = all."""
        if group is self._group:
            return
        self._put_back()
        self._group = group
        if group is None:
            self._part = self._positions, self._hidden, self._residual
            return
        residual = self._split()
        at = group.tokens
        self._part = self._positions[at], self._hidden[at], residual[at]

    def run(self, layer: Any) -> None:
        """Run a layer on the rows that are taken out."""
        positions, hidden, residual = self._part
        hidden, residual = layer(positions, hidden, residual)
        self._part = positions, hidden, residual
        if self._group is None:
            self._hidden, self._residual = hidden, residual

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows, in their places."""
        self.take(None)
        return self._hidden, self._split()

    def _put_back(self) -> None:
        if self._group is not None:
            _, hidden, residual = self._part
            assert self._residual is not None
            assert residual is not None
            self._hidden.index_copy_(0, self._group.tokens, hidden)
            self._residual.index_copy_(0, self._group.tokens, residual)

    def _split(self) -> torch.Tensor:
        """The residual; before the first block it is nothing, and all is still to be added."""
        if self._residual is None:
            self._residual = torch.zeros_like(self._hidden)
        return self._residual
