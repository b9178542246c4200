"""Importance of each block for each input alone, and for each stretch of its tokens."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import ResultError
from buddy.importance.indicators.indicator import build_indicator
from buddy.importance.indicators.skipping import skip_losses


class EachInput:
    """Any indicator, measured afresh on each stretch of each input, as if there were no more text.

    Args:
        name: Of the indicator.
        backbone: The model.
        stretches: Tokens of the input from `start` to `end`, at least two.
    """

    def __init__(self, name: str, backbone: Backbone, stretches: Sequence[tuple[int, int]]) -> None:
        self._name, self._backbone, self._stretches = name, backbone, stretches
        self._scores = torch.zeros(0, len(stretches), backbone.num_blocks, dtype=torch.float64)

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in a batch of inputs."""
        rows = [
            torch.stack([self._score(ids[row : row + 1, slice(*part)]) for part in self._stretches])
            for row in range(len(ids))
        ]
        self._scores = torch.cat([self._scores, torch.stack(rows)])

    def _score(self, ids: Int[Tensor, "1 tokens"]) -> Float[Tensor, " blocks"]:
        indicator = build_indicator(self._name, self._backbone)
        indicator.update(ids)
        return indicator.scores()

    def state(self) -> dict[str, Tensor]:
        """Scores so far."""
        return {"scores": self._scores}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._scores = state["scores"]

    def scores(self) -> Float[Tensor, "inputs stretches blocks"]:
        """Larger = more important."""
        return self._scores


class EachToken:
    """The loss of every token without each block: delta-PPL of every stretch of every input.

    Attention is causal, so one pass over the whole window has the losses of all shorter contexts.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._losses = torch.zeros(0, backbone.num_blocks + 1, 0)

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in a batch of inputs."""
        blocks = range(self._backbone.num_blocks)
        whole, without = skip_losses(self._backbone, ids, blocks)
        losses = torch.stack([*(without[block] for block in blocks), whole], 1).cpu()
        self._losses = torch.cat([self._losses, losses]) if len(self._losses) else losses

    def state(self) -> dict[str, Tensor]:
        """Losses so far: [inputs, blocks + 1, targets], the last without none."""
        return {"losses": self._losses}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._losses = state["losses"]

    def rises(self, start: int, end: int) -> Float[Tensor, "inputs blocks"]:
        """Rise of the perplexity of tokens `start` to `end` of each input, given all before.

        Below zero where an input is better off without a block: cut at zero, as delta-PPL is,
        such blocks would tie.
        """
        # A window's first token has no loss.
        nll = self._losses[:, :, max(start - 1, 0) : end - 1].double().mean(-1)
        perplexity = nll.exp()
        return perplexity[:, :-1] - perplexity[:, -1:]


def spread(windows: Int[Tensor, "windows tokens"], count: int) -> Int[Tensor, "chosen tokens"]:
    """Windows as far apart in the text as it allows, so that all its topics have a part.

    Raises:
        ResultError: There are not as many.
    """
    if count > len(windows):
        raise ResultError(
            f"the text has {len(windows)} windows of {windows.shape[1]} tokens, less than the "
            f"{count} inputs asked for: give more text, or fewer or shorter inputs"
        )
    return windows[torch.linspace(0, len(windows) - 1, count).round().long()]
