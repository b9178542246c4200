"""Runs windows of text through chosen blocks, from any block on: the ground of every indicator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.engine.timeline import Timeline
from buddy.models.backbone import Backbone, Rotary

_HEAD_TOKENS = 1024
"""Positions whose logits are held at once: the vocabulary is wide."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A batch of windows without pads, and what every pass over it shares.

    Attributes:
        backbone: The model.
        ids: [batch, tokens].
        embedded: The residual that enters the first block.
    """

    backbone: Backbone
    ids: Int[Tensor, "batch tokens"]
    embedded: Float[Tensor, "batch tokens hidden"]
    _positions: Int[Tensor, "batch tokens"]
    _rotary: Rotary
    _timeline: Timeline

    @classmethod
    def of(cls, backbone: Backbone, ids: Int[Tensor, "batch tokens"]) -> "Windows":
        """Embed a batch and lay out its positions and masks."""
        ids = ids.to(backbone.device)
        timeline = Timeline(len(ids), ids.shape[1], backbone.device)
        timeline.extend(torch.ones_like(ids, dtype=torch.bool))
        hidden = backbone.embed(ids)
        positions = timeline.new_positions
        return cls(backbone, ids, hidden, positions, backbone.rotary(hidden, positions), timeline)

    def run(
        self, blocks: Iterable[int], hidden: Float[Tensor, "batch tokens hidden"]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run blocks one after another; yields (block, residual before, residual after)."""
        for block in blocks:
            mask = self._timeline.mask(self.backbone.windows[block])
            before = hidden
            hidden = self.backbone.run_block(
                block, before, mask, self._positions, self._rotary, None
            )
            yield block, before, hidden

    def through(
        self, blocks: Iterable[int], hidden: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """The residual after the last of these blocks."""
        for _, _, after in self.run(blocks, hidden):
            hidden = after
        return hidden

    def nll(self, hidden: Float[Tensor, "batch tokens hidden"]) -> Float[Tensor, ""]:
        """Summed negative log-likelihood of every token but each window's first, float64."""
        inputs, targets = hidden[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten()
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(targets), _HEAD_TOKENS):
            part, target = inputs[start:][:_HEAD_TOKENS], targets[start:][:_HEAD_TOKENS]
            logits = self.backbone.logits(part).float()
            total = (
                total + torch.nn.functional.cross_entropy(logits, target, reduction="sum").double()
            )
        return total

    @property
    def num_targets(self) -> int:
        """Tokens that `nll` sums over."""
        return len(self.ids) * (self.ids.shape[1] - 1)
