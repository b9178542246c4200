"""Cells of speed records: read, and put into panels and series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from buddy.errors import ResultError
from buddy.lab.plots.names import policy_name
from buddy.lab.plots.read.fields import MOST_BLOCKS, Fields, open_results, same_num_blocks

PHASES: Final = ("prefill", "decode")
PARTS: Final = ("blocks", "router", "gather_scatter", "kv_fill", "head", "host")
_THEIRS: Final = "transformers"
_FULL: Final = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCell:
    """One measured speed, of ours or of transformers' own generate."""

    record: int
    """Which of the records it is of: each has its own dense model to be compared with."""
    is_ours: bool
    policy: str
    """As `--policy` takes it; `transformers` for theirs."""
    phase: str
    blocks: int
    prefill_blocks: int | None = None
    """Of the prompt's tokens, where a budget names them apart: such cells are a line of their
    own."""
    num_blocks: int
    batch: int
    context: int
    latency_ms: float
    latency_ms_min: float
    latency_ms_max: float
    speedup_own_dense: float
    """Over our dense model, for theirs too."""
    ideal_speedup: float
    shares: tuple[float, ...] | None
    """Of the time, in the order of `PARTS`; they sum to 1."""

    @property
    def line(self) -> tuple[str, int | None]:
        """What is the same in all cells of a line."""
        return self.policy, self.prefill_blocks

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
    opened = open_results(records, figure)
    cells = [
        _cell(item, record)
        for record, results in enumerate(opened)
        for item in results.objects("cells")
    ]
    if not any(cell.is_ours for cell in cells):
        raise ResultError(f"the {figure} figure draws our cells, but all are of {_THEIRS}")
    same_num_blocks([cell.num_blocks for cell in cells], figure)
    seen: dict[tuple[Any, ...], SpeedCell] = {}
    for cell in cells:
        # Every record has these two, so they are told apart by it.
        shared = cell.record if cell.policy in (_FULL, _THEIRS) else None
        key = (shared, cell.line, cell.phase, cell.blocks, cell.setting)
        if seen.setdefault(key, cell) != cell:
            raise ResultError(
                f"{cell.policy!r} has two {cell.phase} speeds at {cell.blocks} blocks, batch "
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
    """As a panel's title says it."""
    return f"batch {setting[0]}, {setting[1]} tokens"


def _cell(item: Fields, record: int) -> SpeedCell:
    num_blocks = item.integer("num_blocks", 1, MOST_BLOCKS)
    if item.text("phase") not in PHASES:
        raise item.wrong("phase", " or ".join(PHASES))
    latency = item.positive("latency_ms")
    is_ours = item.text("label") != _THEIRS
    return SpeedCell(
        record=record,
        is_ours=is_ours,
        policy=item.text("policy") if is_ours else _THEIRS,
        phase=item.text("phase"),
        blocks=item.integer("blocks", 1, num_blocks),
        prefill_blocks=None
        if item.get("prefill_blocks") is None
        else item.integer("prefill_blocks", 1, num_blocks),
        num_blocks=num_blocks,
        batch=item.integer("batch", 1),
        context=item.integer("context", 1),
        latency_ms=latency,
        latency_ms_min=item.positive("latency_ms_min", high=latency),
        latency_ms_max=item.positive("latency_ms_max", low=latency),
        speedup_own_dense=item.number("speedup_own_dense", 0.0),
        ideal_speedup=item.number("ideal_speedup", 0.0),
        shares=None if item.get("shares") is None else _shares(item),
    )


def _shares(item: Fields) -> tuple[float, ...]:
    shares = Fields(item.get("shares"), f"{item.where}, shares")
    found = tuple(shares.number(part, 0.0, 1.0) for part in PARTS)
    if abs(sum(found) - 1) > 0.01:  # rounding; a part left out is more
        raise item.wrong("shares", f"shares that sum to 1, not {sum(found):g}")
    return found
