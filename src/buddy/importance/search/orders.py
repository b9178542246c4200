"""Removal orders from importance: Shortened LLaMA with its protected blocks, ShortGPT, prior."""

from collections.abc import Collection, Sequence
from typing import Final

PROTECTED_FIRST: Final = 4
PROTECTED_LAST: Final = 2


def ascending_order(scores: Sequence[float], protected: Collection[int] = ()) -> list[int]:
    """Blocks from the least important up; protected ones last. Ties: the deeper block first.

    Args:
        scores: One a block, larger = more important.
        protected: Blocks that go only when all others are gone.
    """
    blocks = range(len(scores))
    return sorted(blocks, key=lambda block: (block in protected, scores[block], -block))


def shortened_llama_protected(num_blocks: int) -> tuple[int, ...]:
    """The "+" rule: the first four blocks and the last two are never removed.

    Source: Shortened LLaMA.
    """
    first = range(PROTECTED_FIRST)
    return (*first, *range(num_blocks - PROTECTED_LAST, num_blocks))
