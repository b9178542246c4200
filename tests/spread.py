"""Models whose blocks lie on several pretended devices."""

from itertools import pairwise

from tests.pretend import move

PLACES = (0, 0, 1, 1, 2, 0)
"""The device of each block of a tiny model: neighbours, one alone, and a way back."""


def spread(buddy, places=PLACES):
    """Put a model on the first device, but for some of its blocks."""
    move(buddy)
    for block, index in zip(buddy.backbone.blocks, places, strict=True):
        move(block, index)
    buddy.backbone.locate()
    return buddy


def moves_of(runs, places=PLACES):
    """How often the residual moves on its way through the blocks that run, and home.

    Args:
        runs: Blocks that any new token runs.
        places: Of each block.
    """
    way = [0, *(places[block] for block in sorted(runs)), 0]
    return sum(before != after for before, after in pairwise(way))
