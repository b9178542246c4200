"""Goodput against offered load, and the depth that answers had, side by side."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Annotated, Any, Final

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from buddy.lab.plots import style
from buddy.lab.plots.read import parts
from buddy.settings import Range

_HEIGHT: Final = 1.7


@dataclass(frozen=True, slots=True)
class _Point(parts.RecordPart):
    """What one rate gave; blocks are None where the server named none."""

    offered_rps: parts.Positive
    goodput_rps: parts.NotNegative
    blocks_per_token: Annotated[float, Range(0, parts.MOST_BLOCKS)] | None = None
    rate: parts.Positive | None = None


@dataclass(frozen=True, slots=True)
class _Config(parts.RecordPart):
    """What a record says of its load; a script's command line has its limits as texts."""

    label: parts.Name
    slo_ttft_ms: Any = None
    slo_itl_ms: Any = None

    @property
    def limits(self) -> str:
        """What a good answer keeps; nothing where that is not said."""
        said = []
        for ms, of in ((self.slo_ttft_ms, "to first token"), (self.slo_itl_ms, "a token")):
            with suppress(TypeError, ValueError):
                said.append(f"{float(ms):g} ms {of}")
        return ", ".join(said)


def _repeats(line: Sequence[_Point]) -> list[list[_Point]]:
    """The points of each rate that was meant, rising by what was offered."""
    by_rate: dict[float, list[_Point]] = {}
    for point in line:
        by_rate.setdefault(point.rate or point.offered_rps, []).append(point)
    return sorted(by_rate.values(), key=lambda points: fmean(p.offered_rps for p in points))


def _error(points: Sequence[_Point]) -> float:
    """The standard error of their goodput; 0 of a single one."""
    if len(points) == 1:
        return 0.0
    return stdev([point.goodput_rps for point in points]) / math.sqrt(len(points))


@style.in_paper_style
def draw(records: style.Records, page: style.Page) -> Figure:
    """Draw a line a record; dashed is a server that serves all that it is offered.

    Points of one rate are averaged; bars are standard errors of their means.

    Records: of kind `serving-load`.
    """
    lines: dict[str, list[_Point]] = {}
    limits = set[str]()
    for place, points in enumerate(parts.read_items(records, "load", "points", _Point)):
        config = parts.read_part(
            _Config, records[place].get("config"), f"record {place + 1}: config"
        )
        lines.setdefault(config.label, []).extend(points)
        limits.add(config.limits)
    figure = page.figure(_HEIGHT)
    goodput, depth = figure.subplots(1, 2)
    handles: list[Artist] = []
    for index, line in enumerate(lines.values()):
        repeats = _repeats(line)
        offered = [fmean(point.offered_rps for point in points) for points in repeats]
        good = [fmean(point.goodput_rps for point in points) for points in repeats]
        handles += goodput.plot(offered, good, **style.look(index))
        if len(line) > len(repeats):
            colour = style.look(index)["color"]
            errors = [_error(points) for points in repeats]
            goodput.errorbar(offered, good, errors, fmt="none", ecolor=colour, capsize=2)
        named = [
            [point.blocks_per_token for point in points if point.blocks_per_token is not None]
            for points in repeats
        ]
        fed = [(at, fmean(b)) for at, b in zip(offered, named, strict=True) if b]
        depth.plot([at for at, _ in fed], [blocks for _, blocks in fed], **style.look(index))
    every = [point for line in lines.values() for point in line]
    most = max(point.offered_rps for point in every)
    (ideal,) = goodput.plot(
        [0, most], [0, most], color=style.GREY, linestyle=(0, (4, 2)), linewidth=0.8, zorder=1
    )
    if all(point.blocks_per_token is None for point in every):
        style.not_measured(depth)
    room = page.width / 2 - 0.4
    for axes, label in ((goodput, "Good answers/s"), (depth, "Blocks per token")):
        axes.set_xlabel(style.fold("Offered requests/s", room, style.MEDIUM))
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.grid(visible=True)
    handles, labels = [*handles, ideal], [*lines, "all that is offered"]
    if len(limits) == 1 and (limit := limits.pop()):
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"good: {limit}")
    style.legend_below(figure, handles, labels)
    return figure
