"""Cells of speed records: read, and put into panels and series."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Any, Final, Literal

from buddy.errors import ResultError
from buddy.lab.plots.names import policy_name
from buddy.lab.plots.read import parts
from buddy.settings import Range

PHASES: Final = ("prefill", "decode")
_THEIRS: Final = "transformers"
_FULL: Final = "full"


_Count = Annotated[int, Range(1, 2**53)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares(parts.RecordPart):
    """Parts of the time, 1 in sum."""

    blocks: parts.Share
    router: parts.Share
    gather_scatter: parts.Share
    kv_fill: parts.Share
    head: parts.Share
    host: parts.Share

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        total = sum(astuple(self))
        if abs(total - 1) > 0.01:  # rounding; a part left out is more
            raise ResultError(f"expected shares that sum to 1, not {total:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCell(parts.RecordPart):
    """One measured speed, of ours or of transformers' own generate."""

    label: parts.Name
    policy: parts.Name | None
    """Policy as `--policy` takes it; None for theirs."""
    phase: Literal["prefill", "decode"]
    blocks: parts.Blocks
    prefill_blocks: parts.Blocks | None = None
    """Depth of the prompt's tokens, where a budget names them apart: such cells are a line of their
    own."""
    num_blocks: parts.Blocks
    batch: _Count
    context: _Count
    latency_ms: parts.Positive
    latency_ms_min: parts.Positive
    latency_ms_max: parts.Positive
    speedup_own_dense: parts.NotNegative
    """Speed over our dense model, for theirs too."""
    ideal_speedup: parts.NotNegative
    shares: Shares | None = None
    record: int = 0
    """Which of the records it is of: each has its own dense model to be compared with."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        parts.check_depth("blocks", self.blocks, self.num_blocks)
        parts.check_depth("prefill_blocks", self.prefill_blocks, self.num_blocks)
        if self.is_ours and self.policy is None:
            raise ResultError("policy must be a text, got null")
        if not self.latency_ms_min <= self.latency_ms <= self.latency_ms_max:
            raise ResultError(
                f"latency_ms_min must be at most {self.latency_ms:g} and latency_ms_max at least, "
                f"got {self.latency_ms_min:g} and {self.latency_ms_max:g}"
            )

    @property
    def is_ours(self) -> bool:
        """Whether it is no cell of transformers."""
        return self.label != _THEIRS

    @property
    def line(self) -> tuple[str, int | None]:
        """What is the same in all cells of a line."""
        return self.policy or _THEIRS, self.prefill_blocks

    @property
    def setting(self) -> tuple[int, int]:
        """Batch and context."""
        return self.batch, self.context


def read_cells(records: Sequence[dict[str, Any]], figure: str) -> list[SpeedCell]:
    """Every cell of every record.

    Raises:
        ResultError: A record of another kind, a field missing, models of different depths, two
            different cells of one setting, or no cell of ours.
    """
    cells = [
        replace(cell, record=place)
        for place, cells in enumerate(parts.read_items(records, figure, "cells", SpeedCell))
        for cell in cells
    ]
    if not any(cell.is_ours for cell in cells):
        raise ResultError(f"the {figure} figure draws our cells, but all are of {_THEIRS}")
    parts.same_num_blocks([cell.num_blocks for cell in cells], figure)
    seen: dict[tuple[Any, ...], SpeedCell] = {}
    for cell in cells:
        # Every record has these two, so they are told apart by it.
        shared = cell.record if cell.policy == _FULL or not cell.is_ours else None
        key = (shared, cell.line, cell.phase, cell.blocks, cell.setting)
        if seen.setdefault(key, cell) != cell:
            raise ResultError(
                f"{cell.line[0]!r} has two {cell.phase} speeds at {cell.blocks} blocks, batch "
                f"{cell.batch} and context {cell.context}: leave out one of the records"
            )
    return list(seen.values())


def by_policy(cells: Sequence[SpeedCell]) -> dict[str, list[SpeedCell]]:
    """Our cells in ascending depth by what a legend calls their policy.

    At full depth all policies are one, measured once a record as policy `full`: it ends every
    series of that record whose prompts run as deep as what follows.
    """
    ours = [cell for cell in cells if cell.is_ours]
    full = [cell for cell in ours if cell.policy == _FULL]
    lines = list(dict.fromkeys(cell.line for cell in ours if cell.policy != _FULL))
    lines = lines or [(_FULL, None)]
    names = [_line_name(policy_name(spec), prompt) for spec, prompt in lines]
    series = {}
    for (spec, prompt), name in zip(lines, names, strict=True):
        line = [cell for cell in ours if cell.line == (spec, prompt)]
        measured = {_beside(cell) for cell in line} if prompt is None else set()
        deepest = {_beside(cell) for cell in line if cell.blocks == cell.num_blocks}
        line += [cell for cell in full if _beside(cell) in measured - deepest]
        line.sort(key=lambda cell: cell.blocks)
        series[name if names.count(name) == 1 else _line_name(spec, prompt)] = line
    return series


def _line_name(policy: str, prompt: int | None) -> str:
    return policy if prompt is None else f"{policy}, prompt at {prompt}"


def _beside(cell: SpeedCell) -> tuple[Any, ...]:
    """What cells of one line have in common, besides their policy."""
    return cell.record, cell.phase, cell.setting


def phases_of(cells: Sequence[SpeedCell]) -> list[str]:
    """The phases measured, prefill first."""
    return [phase for phase in PHASES if any(cell.phase == phase for cell in cells)]


def settings_of(cells: Sequence[SpeedCell]) -> list[tuple[int, int]]:
    """The pairs of batch and context measured, ascending."""
    return sorted({cell.setting for cell in cells})


def setting_name(setting: tuple[int, int]) -> str:
    """A setting as a panel's title says it."""
    return f"batch {setting[0]}, {setting[1]} tokens"
