"""What each block's absence costs: the loss without it, blocks before it computed once for all."""

from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.importance.dense import Windows
from buddy.models.backbone import Backbone


@torch.no_grad()
def skip_losses(
    backbone: Backbone,
    ids: Int[Tensor, "batch tokens"],
    candidates: Collection[int],
    removed: Collection[int] = (),
) -> tuple[float, dict[int, float]]:
    """Loss of one batch of windows as it is, and without each candidate in turn.

    The pass that keeps every candidate is made once; each candidate continues from the residual
    that entered it, so on average half the blocks are run.

    Args:
        backbone: The model.
        ids: Windows without pads.
        candidates: Blocks to leave out, one at a time.
        removed: Blocks that are gone already.

    Returns:
        Summed negative log-likelihoods: of the whole pass, and by candidate.
    """
    windows = Windows.of(backbone, ids)
    kept = [block for block in range(backbone.num_blocks) if block not in set(removed)]
    losses = {}
    hidden = windows.embedded
    for block, before, after in windows.run(kept, windows.embedded):
        hidden = after
        if block in candidates:
            rest = [later for later in kept if later > block]
            losses[block] = float(windows.nll(windows.through(rest, before)))
    return float(windows.nll(hidden)), losses


class DeltaPerplexity:
    """`max(0, PPL without the block - PPL)` over all windows.

    Source: paper, section 4.2.2; Shortened LLaMA's PPL criterion.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        # The last entry is the loss of the whole model.
        self._nll = torch.zeros(backbone.num_blocks + 1, dtype=torch.float64)
        self._targets = torch.zeros((), dtype=torch.float64)

    def update(self, ids: Int[Tensor, "batch tokens"]) -> None:
        """Take in one batch of windows."""
        blocks = range(self._backbone.num_blocks)
        whole, without = skip_losses(self._backbone, ids, blocks)
        self._nll += torch.tensor([*(without[block] for block in blocks), whole])
        self._targets += ids.shape[0] * (ids.shape[1] - 1)

    def state(self) -> dict[str, Tensor]:
        """Summed losses and the number of tokens."""
        return {"nll": self._nll, "targets": self._targets}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._nll, self._targets = state["nll"], state["targets"]

    def perplexity(self) -> Float[Tensor, " blocks_and_whole"]:
        """Without each block in turn, and, last, of the whole model."""
        return (self._nll / self._targets).exp()

    def scores(self) -> Float[Tensor, " blocks"]:
        """Rise of the perplexity, not below zero."""
        perplexity = self.perplexity()
        return (perplexity[:-1] - perplexity[-1]).clamp(min=0)
