"""Points and execution rates of evaluations: read, chosen and put into series."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from buddy.errors import ResultError
from buddy.lab.plots.read.fields import MOST_BLOCKS, Fields, open_results, same_num_blocks

_WAYS: Final[dict[str | None, str]] = {"step": "recompute", "prefill": "reuse"}
"""What the paper calls rerouting at each step, and keeping the prompt's route."""
_SHOWN: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measured value of one policy at one depth."""

    policy: str
    label: str
    blocks: int
    num_blocks: int
    task: str
    metric: str
    value: float
    stderr: float | None
    reroute: str | None
    mean_blocks: float | None
    """Of budgets that the predictor or the ledger chose, where `blocks` rounds it; else None."""
    prefill_blocks: int | None
    """Of the prompt's tokens, where theirs is another number; else None."""

    @property
    def is_whole(self) -> bool:
        """Whether its budget has every token run every block."""
        return (
            self.blocks == self.num_blocks
            and self.mean_blocks is None
            and self.prefill_blocks in (None, self.num_blocks)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How often each block ran, for one policy, depth and task."""

    policy: str
    label: str
    blocks: int
    num_blocks: int
    task: str
    rates: tuple[float, ...]
    mean_blocks: float | None
    """As in `Point`."""


def read_points(records: Sequence[dict[str, Any]], figure: str) -> list[Point]:
    """Every point of every record, in their order.

    Raises:
        ResultError: A record of another kind, a field missing, or models of different depths.
    """
    opened = open_results(records, figure)
    points = [_point(item) for results in opened for item in results.objects("points")]
    same_num_blocks([point.num_blocks for point in points], figure)
    return points


def read_execution(records: Sequence[dict[str, Any]], figure: str) -> list[Execution]:
    """Every execution entry of every record, in their order.

    Raises:
        ResultError: As for `read_points`.
    """
    opened = open_results(records, figure)
    entries = [_execution(item) for results in opened for item in results.objects("execution")]
    same_num_blocks([entry.num_blocks for entry in entries], figure)
    return entries


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


def _point(item: Fields) -> Point:
    num_blocks = item.integer("num_blocks", 1, MOST_BLOCKS)
    return Point(
        policy=item.text("policy"),
        label=item.text("label"),
        blocks=item.integer("blocks", 1, num_blocks),
        num_blocks=num_blocks,
        task=item.text("task"),
        metric=item.text("metric"),
        value=item.number("value"),
        stderr=None if item.get("stderr") is None else item.number("stderr", 0.0),
        reroute=None if item.get("reroute") is None else item.text("reroute"),
        mean_blocks=_mean_blocks(item),
        prefill_blocks=(
            None
            if item.get("prefill_blocks") is None
            else item.integer("prefill_blocks", 1, num_blocks)
        ),
    )


def _mean_blocks(item: Fields) -> float | None:
    return None if item.get("mean_blocks") is None else item.positive("mean_blocks")


def _execution(item: Fields) -> Execution:
    num_blocks = item.integer("num_blocks", 1, MOST_BLOCKS)
    return Execution(
        policy=item.text("policy"),
        label=item.text("label"),
        blocks=item.integer("blocks", 1, num_blocks),
        num_blocks=num_blocks,
        task=item.text("task"),
        rates=item.numbers("rates", num_blocks, 0.0, 1.0),
        mean_blocks=_mean_blocks(item),
    )
