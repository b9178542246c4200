"""Which block costs least to lose: branch and bound, so that few candidates need the whole head.

The loss is `log(sum over the vocabulary of exp z) - z_target`. Over a part of the vocabulary that
has the target it is smaller, never larger, and with the few thousand likeliest tokens only a
little. So every candidate first gets such a bound. Then the candidate with the lowest bound has it
replaced by the true loss, batch by batch, until the lowest of all is a true loss through and
through: no other candidate can be below it. The result is that of computing every loss.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.errors import ModelError, PolicyError
from buddy.importance.forward import Windows
from buddy.importance.indicators.skipping import without_each
from buddy.importance.work import Work
from buddy.processes import ALONE, Ranks
from buddy.settings import Range, check_ranges

MARGIN_NATS: Final = 1e-3
"""Per token, taken off every bound: the logits of a part of the vocabulary come from another
matrix product than those of the whole, so they may differ by rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """How much is spent on not computing losses; changes no result."""

    bound_tokens: Annotated[int, Range(1, 2**31)] | None = 4096
    """Likeliest tokens that a bound sums over; None = no bounds, every loss is computed."""
    keep_bytes: Annotated[int, Range(0, 2**63 - 1)] = 2 * 2**30
    """Final residuals kept from bound to loss; what does not fit is run again when needed."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)


class SearchWork(Work, total=False):
    """What every search may be given by name."""

    pruning: Pruning | None
    """What to spend on not computing losses."""


class BoundedLosses:
    """Losses of a model over text, and bounds below them from the likeliest tokens alone.

    Args:
        backbone: The model.
        pruning: What to spend.
    """

    def __init__(self, backbone: Backbone, pruning: Pruning | None) -> None:
        self._backbone, self._pruning = backbone, pruning or Pruning()
        self.exact_losses = 0
        """Losses of one set of blocks on one batch computed so far."""

    def loss(self, windows: Windows, hidden: Tensor) -> float:
        """The summed loss, by the residual after the last block."""
        self.exact_losses += 1
        return as_number(windows.nll(hidden))

    def bound(self, windows: Windows, hidden: Tensor, vocabulary: Tensor) -> float:
        """What the loss is at least, by the tokens of a vocabulary."""
        return as_number(windows.nll(hidden, vocabulary)) - MARGIN_NATS * windows.num_targets

    def vocabulary(self, windows: Windows, hidden: Tensor) -> Tensor | None:
        """The tokens that bounds sum over; None where a bound would cost half a loss or more."""
        size = self._pruning.bound_tokens
        if size is None or 2 * size >= self._backbone.config.vocab_size:
            return None
        return likeliest(windows, hidden, size)


@dataclass(frozen=True, slots=True)
class Losses:
    """What is known of a round: every candidate's summed loss on each batch, or a bound below it.

    Attributes:
        bound: [blocks, batches], NaN where not known.
        exact: Likewise.
    """

    bound: Float[Tensor, "blocks batches"]
    exact: Float[Tensor, "blocks batches"]

    @classmethod
    def unknown(cls, num_blocks: int, num_batches: int) -> "Losses":
        """Those of a round that has not begun."""
        return cls(*torch.full((2, num_blocks, num_batches), math.nan, dtype=torch.float64))

    def lowest(self, block: int) -> float:
        """What the loss over all batches is at least."""
        # Summed one by one from the left, so that equal parts give equal sums everywhere.
        bound, exact = self.bound[block], self.exact[block]
        lowest: list[float] = torch.where(exact.isnan(), bound, exact).tolist()
        return sum(lowest)

    def inexact(self, block: int) -> list[int]:
        """Batches whose loss is not known."""
        return [batch for batch, loss in enumerate(self.exact[block].tolist()) if math.isnan(loss)]

    def unvisited(self, candidates: Collection[int], batch: int) -> list[int]:
        """Candidates of which nothing is known on a batch."""
        unknown = (self.exact[:, batch].isnan() & self.bound[:, batch].isnan()).tolist()
        return [block for block in candidates if unknown[block]]


class Cheapest(BoundedLosses):
    """Finds the cheapest block of round after round over the same text.

    Args:
        backbone: The model.
        batches: Windows without pads, [batch, tokens] each.
        pruning: What to spend.
        ranks: Processes that share the batches, each the same ones in every round.
    """

    def __init__(
        self,
        backbone: Backbone,
        batches: Sequence[Int[Tensor, "_ tokens"]],
        pruning: Pruning | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(backbone, pruning)
        self._batches, self._ranks = batches, ranks
        self._vocabularies: dict[int, Tensor | None] = {}
        self._kept: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def whole_loss(self) -> float:
        """Summed loss with every block; sets up the bounds on the way, so it goes first."""
        return sum(self._ranks.share(range(len(self._batches)), self._whole_loss))

    def _whole_loss(self, batch: int) -> float:
        windows = Windows.of(self._backbone, self._batches[batch])
        hidden = windows.through(range(self._backbone.num_blocks), windows.embedded)
        self._vocabularies[batch] = self.vocabulary(windows, hidden)
        return as_number(windows.nll(hidden))

    @torch.no_grad()
    def find(
        self,
        candidates: Sequence[int],
        removed: Collection[int],
        losses: Losses,
        *,
        on_candidate: Callable[[], None] = lambda: None,
    ) -> tuple[int, float]:
        """The candidate with the lowest loss, and its loss; ties go to the shallower block.

        Args:
            candidates: Blocks that may go.
            removed: Blocks that are gone already.
            losses: What is known; filled in on the way, and right at any moment.
            on_candidate: Called when a candidate has its bound on a batch.
        """
        self._kept.clear()
        ranks = self._ranks

        def visit(batch: int) -> tuple[Tensor, Tensor]:
            unvisited = losses.unvisited(candidates, batch)
            self._visit(batch, unvisited, removed, losses, on_candidate)
            return losses.bound[:, batch], losses.exact[:, batch]

        for batch, found in enumerate(ranks.share(range(len(self._batches)), visit)):
            others = len(losses.unvisited(candidates, batch))
            losses.bound[:, batch], losses.exact[:, batch] = found
            for _ in range(others):
                on_candidate()
        while True:
            block = min(candidates, key=lambda block: (losses.lowest(block), block))
            inexact = losses.inexact(block)
            if not inexact:
                return block, losses.lowest(block)
            own = [batch for batch in inexact if batch % ranks.size == ranks.rank][:1]
            mine = [(batch, self._loss_without(block, batch, removed)) for batch in own]
            for batch, loss in (pair for pairs in ranks.exchange(mine) for pair in pairs):
                losses.exact[block, batch] = loss

    def _visit(
        self,
        batch: int,
        candidates: Collection[int],
        removed: Collection[int],
        losses: Losses,
        on_candidate: Callable[[], None],
    ) -> None:
        """Bound every candidate's loss on a batch; where there are no bounds, compute it."""
        if not candidates:
            return
        windows = Windows.of(self._backbone, self._batches[batch])
        vocabulary = self._vocabularies[batch]
        for block, hidden in without_each(windows, candidates, removed):
            if block is None:
                continue
            if vocabulary is None:
                losses.exact[block, batch] = self.loss(windows, hidden)
            else:
                losses.bound[block, batch] = self.bound(windows, hidden, vocabulary)
                self._keep(block, batch, hidden)
            on_candidate()

    def _keep(self, block: int, batch: int, hidden: Tensor) -> None:
        num_bytes = sum(tensor.nbytes for tensor in self._kept.values())
        if num_bytes + hidden.nbytes <= self._pruning.keep_bytes:
            self._kept[block, batch] = hidden

    def _loss_without(self, block: int, batch: int, removed: Collection[int]) -> float:
        """A candidate's loss on a batch, from its residual if that was kept."""
        windows = Windows.of(self._backbone, self._batches[batch])
        hidden = self._kept.pop((block, batch), None)
        if hidden is None:
            gone = {block, *removed}
            rest = [other for other in range(self._backbone.num_blocks) if other not in gone]
            hidden = windows.through(rest, windows.embedded)
        return self.loss(windows, hidden)


def as_number(nll: Float[Tensor, ""]) -> float:
    """A summed loss that can be compared.

    Raises:
        ModelError: It is NaN.
    """
    if nll.isnan():
        raise ModelError(
            "the loss on the calibration text is not a number: the model's weights are damaged or "
            "its number format overflows; load it in bfloat16 or float32"
        )
    return float(nll)


def likeliest(
    windows: Windows, hidden: Float[Tensor, "batch tokens hidden"], size: int
) -> Int[Tensor, " chosen"]:
    """The `size` likeliest tokens over all positions, and every target; ascending.

    Args:
        windows: Text.
        hidden: Its residual after the last block.
        size: Below the size of the vocabulary.
    """
    parts = [logits.softmax(-1).sum(0) for logits, _ in windows.logits(hidden)]
    chosen = torch.stack(parts).sum(0).topk(size).indices
    return cast(Tensor, torch.unique(torch.cat([chosen, windows.targets])))
