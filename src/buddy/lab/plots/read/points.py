"""Points and execution rates of evaluations: read, chosen and put into series."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

from buddy.errors import ResultError
from buddy.lab.plots.read import parts

_WAYS: Final[dict[str | None, str]] = {"step": "recompute", "prefill": "reuse"}
"""What the paper calls rerouting at each step, and keeping the prompt's route."""
_SHOWN: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(parts.RecordPart):
    """One measured value of one policy at one depth."""

    policy: parts.Name
    label: parts.Name
    blocks: parts.Blocks
    num_blocks: parts.Blocks
    task: parts.Name
    metric: parts.Name
    value: parts.Drawn
    stderr: parts.NotNegative | None = None
    reroute: parts.Name | None = None
    mean_blocks: parts.Positive | None = None
    """Mean where the predictor or the ledger chose, and `blocks` rounds it; else None."""
    prefill_blocks: parts.Blocks | None = None
    """Depth of the prompt's tokens, where theirs is another number; else None."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        parts.check_depth("blocks", self.blocks, self.num_blocks)
        parts.check_depth("prefill_blocks", self.prefill_blocks, self.num_blocks)

    @property
    def is_whole(self) -> bool:
        """Whether its budget has every token run every block."""
        return (
            self.blocks == self.num_blocks
            and self.mean_blocks is None
            and self.prefill_blocks in (None, self.num_blocks)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution(parts.RecordPart):
    """How often each block ran, for one policy, depth and task."""

    policy: parts.Name
    label: parts.Name
    blocks: parts.Blocks
    num_blocks: parts.Blocks
    task: parts.Name
    rates: tuple[parts.Share, ...]
    mean_blocks: parts.Positive | None = None
    """Mean as in `Point`."""

    def __post_init__(self) -> None:
        parts.RecordPart.__post_init__(self)
        parts.check_depth("blocks", self.blocks, self.num_blocks)
        parts.check_length("rates", self.rates, self.num_blocks)


def read_points(records: Sequence[dict[str, Any]], figure: str) -> list[Point]:
    """Every point of every record, in their order.

    Raises:
        ResultError: A record of another kind, a field missing, or models of different depths.
    """
    points = [*chain.from_iterable(parts.read_items(records, figure, "points", Point))]
    parts.same_num_blocks([point.num_blocks for point in points], figure)
    return points


def read_execution(records: Sequence[dict[str, Any]], figure: str) -> list[Execution]:
    """Every execution entry of every record, in their order.

    Raises:
        ResultError: As for `read_points`.
    """
    entries = [*chain.from_iterable(parts.read_items(records, figure, "execution", Execution))]
    parts.same_num_blocks([entry.num_blocks for entry in entries], figure)
    return entries


def narrowed(
    points: Sequence[Point], what: Literal["task", "metric"], asked: str | None, *usual: str
) -> list[Point]:
    """The points of one task or metric, chosen as `choose` does.

    Raises:
        ResultError: As `choose`.
    """
    name = choose([getattr(point, what) for point in points], asked, what, *usual)
    return [point for point in points if getattr(point, what) == name]


def choose(found: Sequence[str], asked: str | None, what: str, *usual: str) -> str:
    """The one asked for; else the first of the usual ones; else the only one there is.

    Raises:
        ResultError: It is not there, or there are several to choose from.
    """
    names = list(dict.fromkeys(found))
    if asked is not None:
        if asked not in names:
            raise ResultError(f"no {what} {asked!r} in these records: {_listing(what, names)}")
        return asked
    names = [name for name in usual if name in names][:1] or names
    if len(names) != 1:
        raise ResultError(f"choose a {what} with --{what}: {_listing(what, names)}")
    return names[0]


def series_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by what a legend calls them, each in ascending depth.

    A label that stands for several policies, or several ways of rerouting, is told apart by
    them. The same point twice is one point.

    Raises:
        ResultError: Two different values for one point of a series.
    """
    policies: dict[str, set[str]] = {}
    reroutes: dict[str, set[str | None]] = {}
    for point in points:
        policies.setdefault(point.label, set()).add(point.policy)
        reroutes.setdefault(point.label, set()).add(point.reroute)
    series: dict[str, dict[int, Point]] = {}
    for point in points:
        name = point.label
        if len(policies[point.label]) > 1:
            name += f" ({point.policy})"
        if len(reroutes[point.label]) > 1:
            name += f", {_WAYS.get(point.reroute, f'reroute {point.reroute}')}"
        there = series.setdefault(name, {}).setdefault(point.blocks, point)
        if (there.value, there.stderr) != (point.value, point.stderr):
            raise ResultError(
                f"{name!r} has two values of {point.metric} on {point.task} at {point.blocks} "
                f"blocks, {there.value:g} and {point.value:g}: leave out one of the records, or "
                "make one again under another label"
            )
    return {name: [depth[b] for b in sorted(depth)] for name, depth in series.items()}


def dense_values(points: Sequence[Point]) -> list[float]:
    """What the whole models score, by policy `full`: one value, or one a checkpoint.

    Without that policy, the one value that all agree on who ran every block, if there is one.
    """
    full = {point.value for point in points if point.policy == "full"}
    whole = {point.value for point in points if point.is_whole}
    return sorted(full or (whole if len(whole) == 1 else ()))


def _listing(what: str, names: Sequence[str]) -> str:
    if not names:
        return f"there is no {what} at all"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"there is {what} {', '.join(names[:_SHOWN])}{more}"
