"""A plan: which blocks run, for each row of a batch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Rows = slice | Tensor | None
"""Rows of a batch: `slice(None)` all of them (a view), a tensor those named, None not one."""

ALL_ROWS = slice(None)


class BlockRows(NamedTuple):
    """How the batch divides at one block."""

    run: Rows
    skip: Rows


@dataclass(frozen=True, eq=False)
class DepthPlan:
    """Which blocks run, per row.

    Attributes:
        mask: [batch, blocks], True = run.
    """

    mask: Bool[Tensor, "batch blocks"]

    @classmethod
    def full(cls, batch: int, num_blocks: int, device: torch.device | str = "cpu") -> "DepthPlan":
        """Every row runs every block."""
        return cls(torch.ones(batch, num_blocks, dtype=torch.bool, device=device))

    @classmethod
    def of_rows(cls, rows: list[list[bool]], device: torch.device | str = "cpu") -> "DepthPlan":
        """A plan that the host knows: it need not be read back from the device."""
        plan = cls(torch.tensor(rows, dtype=torch.bool, device=device))
        plan.__dict__["rows"] = rows
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DepthPlan) and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    @property
    def depth(self) -> Int[Tensor, " batch"]:
        """Blocks that each row is to run."""
        return self.mask.sum(dim=1)

    @cached_property
    def rows(self) -> list[list[bool]]:
        """The mask, on the host."""
        rows: list[list[bool]] = self.mask.tolist()
        return rows

    @cached_property
    def keys(self) -> tuple[tuple[int, ...], ...]:
        """Each row's executed blocks, ascending: hashable, to count and compare plans."""
        return tuple(tuple(block for block, runs in enumerate(row) if runs) for row in self.rows)

    @cached_property
    def blocks(self) -> tuple[BlockRows, ...]:
        """For each block the rows that run it and the rows that skip it."""
        return tuple(self._divide(list(column)) for column in zip(*self.rows, strict=True))

    def _divide(self, runs: list[bool]) -> BlockRows:
        if all(runs):
            return BlockRows(ALL_ROWS, None)
        if not any(runs):
            return BlockRows(None, ALL_ROWS)
        device = self.mask.device
        return BlockRows(
            torch.tensor([row for row, r in enumerate(runs) if r], device=device),
            torch.tensor([row for row, r in enumerate(runs) if not r], device=device),
        )

    def select_rows(self, rows: Int[Tensor, " chosen"]) -> "DepthPlan":
        """The plan of the rows named, in that order."""
        return DepthPlan(self.mask[rows])
