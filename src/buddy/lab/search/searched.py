"""Swap search: at each depth its own best set of blocks, from a removal order's by exchanges."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.blocks import least_blocks
from buddy.errors import PolicyError
from buddy.importance.search.bounded import SearchWork
from buddy.importance.work import BATCH, resume_file
from buddy.lab.search.nearby import NearbyLosses
from buddy.lab.search.passages import Passages
from buddy.processes import ALONE, Ranks
from buddy.resume import ResumeFile


@dataclass(frozen=True, slots=True)
class SearchedSet:
    """What is found at one depth, so far.

    Attributes:
        blocks: That run, ascending.
        first_loss: Summed negative log-likelihood of the removal order's set.
        loss: Of this one.
        swaps: Exchanges that were made.
        place: Exchanges that were tried since, in vain.
        tried: Exchanges that were tried in all.
    """

    blocks: tuple[int, ...]
    first_loss: float
    loss: float
    swaps: int = 0
    place: int = 0
    tried: int = 0


OnTry = Callable[[int, SearchedSet], None]
"""Called as `on_try(depth, what is found there)` after each exchange that was tried."""


def swap_search(
    backbone: Backbone,
    text: Passages,
    order: Sequence[int],
    depths: Sequence[int],
    *,
    seed: int = 0,
    max_swaps: int | None = None,
    on_try: OnTry = lambda depth, best: None,
    **work: Unpack[SearchWork],
) -> dict[int, SearchedSet]:
    """Improve each depth's set by exchanges: one executed block goes, a skipped one comes.

    The first exchange that lowers the loss is made, in a random order; then all are open again,
    until none lowers it.

    Args:
        backbone: The model.
        text: Calibration text.
        order: 0-based blocks, least important first; blocks not named never go.
        depths: Blocks to run, each searched for itself.
        seed: Of the order in which exchanges are tried.
        max_swaps: Exchanges to try at each depth; None = until none helps.
        on_try: Told of each exchange that was tried, and of each depth's loss before the first.
        **work: See `SearchWork`.

    Raises:
        PolicyError: The order cannot reach a depth, or names no blocks of this model.
        ResultError: The resume file is damaged, belongs to another search, or cannot be written.
    """
    check_depths(order, depths, backbone.num_blocks)
    counted = None if text.counted is None else text.counted.long().sum(1).tolist()
    settings = {"order": list(order), "depths": list(depths), "seed": seed, "targets": counted}
    file = resume_file(text.ids, {"search": "sets", **settings}, work)
    ranks = work.get("ranks", ALONE)
    sets = ranks.from_writer(lambda: _read(file, depths, backbone.num_blocks))
    batches = text.split(work.get("batch", BATCH))
    losses = NearbyLosses(backbone, batches, work.get("pruning"))
    try:
        for depth in depths:
            search = _Search(losses, order, backbone.num_blocks, depth, seed, ranks)
            for best in search.run(sets.get(depth) or search.start(), max_swaps):
                sets[depth] = best
                on_try(depth, best)
                file.write_if_due(lambda: _tensors(sets, depths, backbone.num_blocks))
    finally:
        # Whatever stops the search, Ctrl-C above all: no exchange that was tried is tried again.
        file.write(_tensors(sets, depths, backbone.num_blocks))
    return sets


def check_depths(order: Sequence[int], depths: Sequence[int], num_blocks: int) -> None:
    """Refuse an order or depths that cannot be searched in a model of so many blocks.

    Raises:
        PolicyError: A block is named twice or does not exist, or a depth cannot be had.
    """
    if len(set(order)) != len(order) or not all(0 <= block < num_blocks for block in order):
        raise PolicyError(
            f"a removal order names each block once, from 0 to {num_blocks - 1}, got {list(order)}"
        )
    least = max(least_blocks(num_blocks), num_blocks - len(order))
    wrong = [depth for depth in depths if not least <= depth <= num_blocks]
    if wrong or not depths or len(set(depths)) != len(depths):
        got = ", ".join(map(str, wrong or depths)) or "none"
        raise PolicyError(
            f"depths must be different numbers from {least}, the fewest that this removal order "
            f"leaves and a budget may be, to {num_blocks} blocks, got {got}"
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """The search at one depth."""

    losses: NearbyLosses
    order: Sequence[int]
    num_blocks: int
    depth: int
    seed: int
    ranks: Ranks

    def start(self) -> SearchedSet:
        """The removal order's own set, not yet measured."""
        gone = set(self.order[: self.num_blocks - self.depth])
        blocks = (block for block in range(self.num_blocks) if block not in gone)
        return SearchedSet(tuple(blocks), math.nan, math.nan)

    def run(self, best: SearchedSet, max_swaps: int | None) -> Iterator[SearchedSet]:
        """Yields the best set after each exchange that is tried; first, the loss to begin with.

        Of several processes each tries another exchange at a time.
        """

        def open_swaps() -> list[tuple[int, int]]:
            left = self._swaps(best)[best.place :]
            return left if max_swaps is None else left[: max(0, max_swaps - best.tried)]

        def blocks_after(swap: tuple[int, int]) -> set[int]:
            goes, comes = swap
            return {*best.blocks, comes} - {goes}

        def lower(swap: tuple[int, int]) -> float | None:
            return self.losses.below(blocks_after(swap), best.loss)

        if open_swaps() or math.isnan(best.loss):
            loss = self.losses.rebase(best.blocks)
            if math.isnan(best.loss):
                best = replace(best, first_loss=loss, loss=loss)
                yield best
        while swaps := open_swaps():
            for swap, found in zip(swaps, self.ranks.share(swaps, lower), strict=True):
                made = tuple(sorted(blocks_after(swap)))
                best = replace(best, place=best.place + 1, tried=best.tried + 1)
                if found is not None:
                    best = replace(best, blocks=made, loss=found, swaps=best.swaps + 1, place=0)
                yield best
                if found is not None:
                    break
            if best.place == 0 and open_swaps():  # an exchange was made
                self.losses.rebase(best.blocks)

    def _swaps(self, best: SearchedSet) -> list[tuple[int, int]]:
        """Every exchange, as (goes, comes), in a random order of its own after each one made."""
        middle = [b for b in best.blocks if b in self.order and 0 < b < self.num_blocks - 1]
        skipped = [b for b in range(self.num_blocks) if b not in best.blocks]
        swaps = [(goes, comes) for goes in middle for comes in skipped]
        random.Random(f"{self.seed} {self.depth} {best.swaps}").shuffle(swaps)
        return swaps


_BLOCKS, _LOSSES, _COUNTS = "blocks", "losses", "counts"


def _tensors(
    sets: Mapping[int, SearchedSet], depths: Sequence[int], num_blocks: int
) -> dict[str, Tensor]:
    """One row a depth; the loss of a depth that has none yet is NaN."""
    blocks = torch.zeros(len(depths), num_blocks, dtype=torch.bool)
    losses = torch.full((len(depths), 2), math.nan, dtype=torch.float64)
    counts = torch.zeros(len(depths), 3, dtype=torch.long)
    for row, depth in enumerate(depths):
        if depth in sets:
            best = sets[depth]
            blocks[row, list(best.blocks)] = True
            losses[row] = torch.tensor([best.first_loss, best.loss], dtype=torch.float64)
            counts[row] = torch.tensor([best.swaps, best.place, best.tried])
    return {_BLOCKS: blocks, _LOSSES: losses, _COUNTS: counts}


def _read(file: ResumeFile, depths: Sequence[int], num_blocks: int) -> dict[int, SearchedSet]:
    earlier = file.read(_tensors({}, depths, num_blocks))
    if earlier is None:
        return {}
    sets = {}
    tensors = [earlier.tensors[name] for name in (_BLOCKS, _LOSSES, _COUNTS)]
    rows = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    for depth, (block_mask, losses, counts) in zip(depths, rows, strict=True):
        if not math.isnan(losses[1]):
            blocks = tuple(block for block, ran in enumerate(block_mask) if ran)
            if len(blocks) != depth or min(counts) < 0:
                raise file.damaged(f"it has a set of {len(blocks)} blocks, tried {counts[2]} times")
            sets[depth] = SearchedSet(blocks, *losses, *counts)
    return sets
