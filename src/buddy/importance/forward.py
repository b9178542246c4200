"""Runs windows of text through chosen blocks, from any block on: the ground of every indicator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone, Rotary
from buddy.depth.wide import widened
from buddy.engine.state.lanes import Frame, Lanes

_HEAD_TOKENS = 256
"""Positions whose logits are held at once: more fall out of the processor's cache."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A batch of windows without pads, and what every pass over it shares.

    Attributes:
        backbone: The model.
        ids: [batch, tokens].
        embedded: The residual that enters the first block.
        counted: Tokens, each window's first left out, that are targets; None = all. Where it
            leaves out what follows the last target, pads may stand there: nothing before sees them.
    """

    backbone: Backbone
    ids: Int[Tensor, "batch tokens"]
    embedded: Float[Tensor, "batch tokens hidden"]
    _rotary: Rotary
    _frame: Frame
    counted: Bool[Tensor, "batch targets"] | None = None

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        ids: Int[Tensor, "batch tokens"],
        counted: Bool[Tensor, "batch targets"] | None = None,
    ) -> "Windows":
        """Embed a batch and lay out its positions and masks."""
        ids = ids.to(backbone.device)
        counted = None if counted is None else counted.to(backbone.device)
        frame = Lanes.prompts([ids.shape[1]] * len(ids), backbone.device).whole
        hidden = backbone.embed(ids)
        rotary = backbone.rotary(hidden, frame.positions)
        return cls(backbone, ids, hidden, rotary, frame, counted)

    def run(
        self, blocks: Iterable[int], hidden: Float[Tensor, "batch tokens hidden"]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Run blocks one after another; yields (block, residual before, residual after)."""
        for block in blocks:
            mask = self._frame.mask(self.backbone.windows[block])
            before = hidden
            hidden = self.backbone.run_block(
                block, before, mask, self._frame.positions, self._rotary, None
            )
            yield block, before, hidden

    def through(
        self, blocks: Iterable[int], hidden: Float[Tensor, "batch tokens hidden"]
    ) -> Float[Tensor, "batch tokens hidden"]:
        """The residual after the last of these blocks."""
        for _, _, after in self.run(blocks, hidden):
            hidden = after
        return hidden

    def logits(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        vocabulary: Int[Tensor, " chosen"] | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and target of every target, some positions at a time.

        Args:
            hidden: The residual after the last block.
            vocabulary: Ascending ids, the targets among them: logits of these alone, and targets
                as their places. None = all.

        Yields:
            Logits [positions, vocabulary], float32, and targets [positions].
        """
        inputs, targets = self._chosen(hidden[:, :-1]), self.targets
        if vocabulary is not None:
            targets = torch.searchsorted(vocabulary, targets)
        parts = torch.split(inputs, _HEAD_TOKENS), torch.split(targets, _HEAD_TOKENS)
        for part, target in zip(*parts, strict=True):
            if vocabulary is None:
                yield self.backbone.logits(part).float(), target
            else:
                yield self.backbone.logits_of(part, vocabulary).float(), target

    def token_losses(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        vocabulary: Int[Tensor, " chosen"] | None = None,
    ) -> Float[Tensor, "batch targets"]:
        """Negative log-likelihood of every token but each window's first, float32.

        For windows whose tokens are all targets. With a vocabulary (see `logits`), as if there
        were no other tokens: never above the loss.
        """
        return self._losses(hidden, vocabulary).view(len(self.ids), -1)

    def nll(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        vocabulary: Int[Tensor, " chosen"] | None = None,
    ) -> Float[Tensor, ""]:
        """Sum of the targets' losses, in the device's widest number format."""
        return widened(self._losses(hidden, vocabulary)).sum()

    def _losses(
        self,
        hidden: Float[Tensor, "batch tokens hidden"],
        vocabulary: Int[Tensor, " chosen"] | None,
    ) -> Float[Tensor, " targets"]:
        losses = [
            torch.nn.functional.cross_entropy(logits, target, reduction="none")
            for logits, target in self.logits(hidden, vocabulary)
        ]
        return torch.cat(losses)

    def _chosen(self, of_tokens: Tensor) -> Tensor:
        """What is of the targets, of values of every token but the first (or the last)."""
        return of_tokens.flatten(0, 1) if self.counted is None else of_tokens[self.counted]

    @property
    def targets(self) -> Int[Tensor, " targets"]:
        """The tokens whose loss counts, window after window."""
        return self._chosen(self.ids[:, 1:])

    @property
    def num_targets(self) -> int:
        """Tokens that `nll` sums over."""
        return len(self.targets)
