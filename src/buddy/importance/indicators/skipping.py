"""What each block's absence costs: the loss without it, blocks before it computed once for all."""

from collections.abc import Collection, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.importance.forward import Windows


def without_each(
    windows: Windows, candidates: Collection[int], removed: Collection[int] = ()
) -> Iterator[tuple[int | None, Tensor]]:
    """The residual after the last block without each candidate in turn; under None, with all.

    The pass that keeps every candidate is made once; each candidate continues from the residual
    that entered it, so on average half the blocks are run. That changes no bit of the result.

    Args:
        windows: Text.
        candidates: Blocks to leave out, one at a time.
        removed: Blocks that are gone already.

    Yields:
        (candidate, residual), the shallowest first; None comes last.
    """
    rest = [block for block in range(windows.backbone.num_blocks) if block not in set(removed)]
    hidden = windows.embedded
    for block, before, after in windows.run(rest, windows.embedded):
        hidden = after
        if block in candidates:
            yield block, windows.through([later for later in rest if later > block], before)
    yield None, hidden


@torch.no_grad()
def skip_losses(
    backbone: Backbone,
    ids: Int[Tensor, "batch tokens"],
    candidates: Collection[int],
    removed: Collection[int] = (),
) -> tuple[Float[Tensor, "batch targets"], dict[int, Tensor]]:
    """Loss of each token of a batch of windows as it is, and without each candidate in turn.

    Args:
        backbone: The model.
        ids: Windows without pads.
        candidates: Blocks to leave out, one at a time.
        removed: Blocks that are gone already.

    Returns:
        Negative log-likelihoods [batch, targets] of every token but each window's first, float32:
        of the whole pass, and by candidate. A window's are the same in any batch, and depend on
        no later token.
    """
    windows = Windows.of(backbone, ids)
    losses = {
        block: windows.token_losses(hidden)
        for block, hidden in without_each(windows, candidates, removed)
    }
    return losses.pop(None), {b: loss for b, loss in losses.items() if b is not None}


class DeltaPerplexity:
    """`PPL without the block - PPL` over all windows; a prior takes what is below zero as zero.

    Source: paper, section 4.2.2; Shortened LLaMA's PPL criterion, which orders by it as it is.
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
        losses = torch.stack([*(without[block] for block in blocks), whole])  # [L + 1, B, T - 1]
        self._nll += losses.cpu().double().sum((1, 2))
        self._targets += whole.numel()

    def state(self) -> dict[str, Tensor]:
        """Summed losses and the number of tokens."""
        return {"nll": self._nll, "targets": self._targets}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from an earlier `state`."""
        self._nll, self._targets = state["nll"], state["targets"]

    def perplexity(self) -> Float[Tensor, " blocks_and_whole"]:
        """The perplexity without each block in turn, and, last, that of the whole model."""
        return (self._nll / self._targets).exp()

    def scores(self) -> Float[Tensor, " blocks"]:
        """Rise of the perplexity; below zero where the model is better off without the block."""
        perplexity = self.perplexity()
        return perplexity[:-1] - perplexity[-1]
