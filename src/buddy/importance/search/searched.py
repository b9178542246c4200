"""Swap search: at each depth its own best set of blocks, from a removal order's by exchanges."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buddy.backbone.backbone import Backbone
from buddy.budget.blocks import least_blocks
from buddy.errors import PolicyError
from buddy.importance.calibration import Passages
from buddy.importance.search.bounded import Pruning
from buddy.importance.search.nearby import NearbyLosses
from buddy.resume import ResumeFile, fingerprint


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
    batch: int = 4,
    pruning: Pruning | None = None,
    resume: Path | None = None,
    identity: dict[str, Any] | None = None,
    on_try: OnTry = lambda depth, found: None,
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
        batch: Rows of text at a time.
        pruning: What to spend on not computing losses.
        resume: File that keeps what was found; the caller deletes it once the result is kept.
        identity: What the search depends on (model ...); a file of another one is refused.
        on_try: Told of each exchange that was tried, and of each depth's loss before the first.

    Raises:
        PolicyError: The order cannot reach a depth, or names no blocks of this model.
        ResultError: The resume file is damaged, belongs to another search, or cannot be written.
    """
    check_depths(order, depths, backbone.num_blocks)
    counted = None if text.counted is None else text.counted.long().sum(1).tolist()
    settings = {"order": list(order), "depths": list(depths), "seed": seed, "batch": batch}
    about = {"search": "sets", **settings, "targets": counted, **(identity or {})}
    file = ResumeFile(resume, {**about, "text": fingerprint(text.ids)})
    found = _read(file, depths)
    losses = NearbyLosses(backbone, text.split(batch), pruning)
    try:
        for depth in depths:
            search = _Search(losses, order, backbone.num_blocks, depth, seed)
            for now in search.run(found.get(depth) or search.start(), max_swaps):
                found[depth] = now
                on_try(depth, now)
                file.write_if_due(lambda: _tensors(found, depths, backbone.num_blocks))
    finally:
        # Whatever stops the search, Ctrl-C above all: no exchange that was tried is tried again.
        file.write(_tensors(found, depths, backbone.num_blocks))
    return found


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

    def start(self) -> SearchedSet:
        """The removal order's own set, not yet measured."""
        gone = set(self.order[: self.num_blocks - self.depth])
        blocks = (block for block in range(self.num_blocks) if block not in gone)
        return SearchedSet(tuple(blocks), math.nan, math.nan)

    def run(self, found: SearchedSet, max_swaps: int | None) -> Iterator[SearchedSet]:
        """Yields what is found after each exchange that is tried; first, the loss to begin with."""
        swaps = self._swaps(found)

        def is_open() -> bool:
            return found.place < len(swaps) and (max_swaps is None or found.tried < max_swaps)

        if is_open() or math.isnan(found.loss):
            loss = self.losses.rebase(found.blocks)
            if math.isnan(found.loss):
                found = replace(found, first_loss=loss, loss=loss)
                yield found
        while is_open():
            goes, comes = swaps[found.place]
            blocks = {*found.blocks, comes} - {goes}
            lower = self.losses.below(blocks, found.loss)
            found = replace(found, place=found.place + 1, tried=found.tried + 1)
            if lower is not None:
                kept = tuple(sorted(blocks))
                found = replace(found, blocks=kept, loss=lower, swaps=found.swaps + 1, place=0)
                swaps = self._swaps(found)
            yield found
            if lower is not None and is_open():
                self.losses.rebase(found.blocks)

    def _swaps(self, found: SearchedSet) -> list[tuple[int, int]]:
        """Every exchange, as (goes, comes), in a random order of its own after each one made."""
        middle = [b for b in found.blocks if b in self.order and 0 < b < self.num_blocks - 1]
        skipped = [b for b in range(self.num_blocks) if b not in found.blocks]
        swaps = [(goes, comes) for goes in middle for comes in skipped]
        random.Random(f"{self.seed} {self.depth} {found.swaps}").shuffle(swaps)
        return swaps


_BLOCKS, _LOSSES, _COUNTS = "blocks", "losses", "counts"


def _tensors(
    found: Mapping[int, SearchedSet], depths: Sequence[int], num_blocks: int
) -> dict[str, Tensor]:
    """One row a depth; the loss of a depth that has none yet is NaN."""
    blocks = torch.zeros(len(depths), num_blocks, dtype=torch.bool)
    losses = torch.full((len(depths), 2), math.nan, dtype=torch.float64)
    counts = torch.zeros(len(depths), 3, dtype=torch.long)
    for row, depth in enumerate(depths):
        if depth in found:
            one = found[depth]
            blocks[row, list(one.blocks)] = True
            losses[row] = torch.tensor([one.first_loss, one.loss], dtype=torch.float64)
            counts[row] = torch.tensor([one.swaps, one.place, one.tried])
    return {_BLOCKS: blocks, _LOSSES: losses, _COUNTS: counts}


def _read(file: ResumeFile, depths: Sequence[int]) -> dict[int, SearchedSet]:
    tensors = file.read(_BLOCKS, _LOSSES, _COUNTS)
    if tensors is None:
        return {}
    found = {}
    rows = zip(*(tensors[name].tolist() for name in (_BLOCKS, _LOSSES, _COUNTS)), strict=True)
    for depth, (runs, losses, counts) in zip(depths, rows, strict=True):
        if not math.isnan(losses[1]):
            blocks = tuple(block for block, ran in enumerate(runs) if ran)
            found[depth] = SearchedSet(blocks, *losses, *counts)
    return found
