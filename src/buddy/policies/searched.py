"""Searched sets: one set of blocks for each of some depths, none of them part of another."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from buddy.depth.policy import BatchSize, BlockScores, DepthPolicy, PolicyResources, RowBudgets
from buddy.errors import PolicyError, shown
from buddy.policies.measured import read_sets


class SearchedPolicy(DepthPolicy):
    """The set that was searched at a depth; between them, blocks of a removal order are added.

    At a depth that was not searched the nearest smaller set runs, and the blocks that the order
    removes last beside it; where none is smaller, the order alone decides.

    Args:
        sets: By depth, the blocks that run.
        removal_order: 0-based blocks, least important first; blocks not named never go.
        num_blocks: Blocks of the model.
        source: Where the sets come from, for summary lines.

    Raises:
        PolicyError: A set has not as many blocks as its depth, or lacks a block that never goes;
            or a block is named twice, or does not exist.
    """

    name = "searched"

    def __init__(
        self,
        sets: Mapping[int, Sequence[int]],
        removal_order: Sequence[int],
        num_blocks: int,
        *,
        source: str = "given sets",
    ) -> None:
        order = list(removal_order)
        if len(set(order)) != len(order) or not all(0 <= block < num_blocks for block in order):
            raise PolicyError(
                f"a removal order names each block once, from 0 to {num_blocks - 1}, got "
                f"{shown(order)}"
            )
        super().__init__(num_blocks)
        self.source = source
        self.removal_order = tuple(order)
        self.pinned = tuple(block for block in range(num_blocks) if block not in set(order))
        self.sets = {depth: self._check(depth, blocks) for depth, blocks in sorted(sets.items())}
        self._scores = torch.stack(
            [self._scores_at(depth, order) for depth in range(num_blocks + 1)]
        )  # [L + 1, L], by budget

    def _check(self, depth: int, blocks: Sequence[int]) -> tuple[int, ...]:
        chosen = set(blocks)
        if (
            len(blocks) != depth
            or len(chosen) != depth
            or not chosen <= set(range(self.num_blocks))
        ):
            raise PolicyError(
                f"the set for {depth} blocks must name {depth} blocks, each once, from 0 to "
                f"{self.num_blocks - 1}, got {shown(list(blocks))}: search it "
                "again for this model"
            )
        missing = [block for block in self.pinned if block not in chosen]
        if missing:
            raise PolicyError(
                f"the set for {depth} blocks lacks block {missing[0]}, which the removal order "
                "never removes: search it again from this order"
            )
        return tuple(sorted(chosen))

    def _scores_at(self, depth: int, order: Sequence[int]) -> Float[Tensor, " blocks"]:
        """Place in the removal order, the later the higher; the blocks of the set above all."""
        scores = torch.zeros(self.num_blocks)
        scores[list(order)] = torch.arange(1.0, len(order) + 1)
        smaller = [searched for searched in self.sets if searched <= depth]
        if smaller:
            scores[list(self.sets[smaller[-1]])] += self.num_blocks + 1
        return scores

    @classmethod
    def from_spec(cls, argument: str, resources: PolicyResources) -> "SearchedPolicy":
        """Make it from `searched:RECORD.json`, which `buddy search` writes, or from `written`."""
        if argument.endswith(".json"):
            sets, order, source = read_sets(Path(argument), resources)
            return cls(sets, order, resources.num_blocks, source=source)
        order_text, *set_texts = argument.split(";")
        try:
            parts = [text.split("@") for text in set_texts]
            sets = {int(depth): _blocks(blocks) for depth, blocks in parts}
            order = _blocks(order_text)
        except ValueError:
            sets, order = {}, []
        if not sets or len(sets) < len(set_texts):
            raise PolicyError(
                "policy searched takes a record, as in searched:RECORD.json: write it with buddy "
                f"search; got {shown(argument)}"
            )
        return cls(sets, order, resources.num_blocks)

    def written(self) -> str:
        """The policy in one word, without a file: `searched:ORDER;DEPTH@BLOCKS;DEPTH@BLOCKS`."""
        sets = [f"{depth}@{_text(blocks)}" for depth, blocks in self.sets.items()]
        return f"searched:{';'.join([_text(self.removal_order), *sets])}"

    def scores(self, state: BatchSize, blocks: RowBudgets) -> BlockScores:
        """Those of each row's budget: its set above all else."""
        return self._scores.to(state.device)[blocks]

    def describe(self) -> str:
        """A few words for a summary line."""
        depths = ", ".join(map(str, self.sets))
        return f"searched sets of {depths} blocks, {self.source}"


def _blocks(text: str) -> list[int]:
    return [int(block) for block in text.split(",")]


def _text(blocks: Sequence[int]) -> str:
    return ",".join(map(str, blocks))
