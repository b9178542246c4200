"""Ablations of the router: what it reads, its prior, the prior's weight, and the block it reads.

Every run differs from its neighbours in one setting. The paper's own figures show that it varied
what the router reads without a prior, and the weight with Taylor's: so do these.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from buddy.lab.paper.levels import BUDGETS, budget_at, flags, level
from buddy.lab.paper.orders import measure_order
from buddy.lab.paper.panels import REMOVED, Figure, line, number, panel, removed, removed_by
from buddy.lab.paper.published.read import ABLATED, Row, read_paper
from buddy.lab.paper.recipes import stage_1
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

STEPS: Final = 200
_NAMES: Final = {
    "context": "Router reads",
    "prior": "Prior",
    "omega": "Omega",
    "start-layer": "Block that is read",
}
Settings = Mapping[str, Mapping[str, Any]]


def _context(run: Run) -> Settings:
    return {
        source: {"prior": "none", "planner": {"context": source}}
        for source in ("key", "value", "key+value")
    }


def _prior(run: Run) -> Settings:
    measured = {name: str(measure_order(run, name)) for name in ("delta-ppl", "cosine", "taylor")}
    return {name: {"prior": prior} for name, prior in {"none": "none", **measured}.items()}


def _omega(run: Run) -> Settings:
    taylor = str(measure_order(run, "taylor"))
    return {
        str(omega): {"prior": taylor, "omega": omega} for omega in (0.01, 0.1, 0.3, 0.5, 0.7, 1.0)
    }


def _start_layer(run: Run) -> Settings:
    most = min(4, run.outline().num_blocks // 2 - 1)
    return {
        str(layer): {"prior": "none", "planner": {"context_layer": layer}}
        for layer in range(1, most + 1)
    }


_SETTINGS: Final[dict[str, Callable[[Run], Settings]]] = {
    "context": _context,
    "prior": _prior,
    "omega": _omega,
    "start-layer": _start_layer,
}


def collect(run: Run) -> Collected:
    """Train what is not trained yet; compare losses, and with `--full` accuracy."""
    from buddy.records import read_record
    from buddy.training.router.recipe import Recipe

    name = run.request.table
    points: list[dict[str, Any]] = []
    for setting, router in _SETTINGS[name](run).items():
        folder = run.train(
            f"{name}-{setting.replace('+', '-')}",
            "train",
            stage_1(run, router, steps=run.rows(STEPS, None) or STEPS),
            Recipe,
            model=run.base(),
        )
        record = read_record(folder / "record.json")
        num_blocks = record["model"]["num_blocks"]
        points += [
            {"setting": setting, "num_blocks": num_blocks, **point}
            for point in record["results"]["evaluation"]
        ]
        if run.request.full:
            points += _accuracy(run, setting, folder)
    theirs = [row for row in read_paper("ablations") if row["ablation"] == name]
    return Collected(
        results={"points": points, "panels": _panels(name, points, theirs), "paper": theirs},
        sheets=(_sheet(name, points, theirs),),
        facts=None,
        settings={"rows": run.request.rows}
        if run.request.full
        else {"steps": run.rows(STEPS, None)},
    )


def _accuracy(run: Run, setting: str, folder: Path) -> list[dict[str, Any]]:
    checkpoint = str(folder / "checkpoint")
    record = run.buddy(
        f"{folder.name}-tasks",
        *("eval", "tasks", "--model", checkpoint, *flags(BUDGETS), *run.data()),
        *(() if run.request.rows is None else ("--limit", str(run.request.rows))),
        model=checkpoint,
    )
    return [
        {"setting": setting, **point}
        for point in record["results"]["points"]
        if point["task"] == "average"
    ]


def _sheet(name: str, points: Sequence[dict[str, Any]], theirs: Sequence[Row]) -> Sheet:
    """A row a setting and depth: loss, plans, accuracy if measured, and the paper's accuracy."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for point in points:
        rows.setdefault((point["setting"], point["blocks"]), {}).update(point)
    depth = points[0]["num_blocks"]
    reported = {(row["setting"], level(row, list(theirs))): row["average"] for row in theirs}
    body = [
        (
            setting,
            blocks,
            f"{point['cross_entropy']:.3f}" if "cross_entropy" in point else "",
            point.get("distinct_plans", ""),
            f"{100 * point['value']:.1f}" if "value" in point else "",
            reported.get((setting, budget_at(blocks, depth)), ""),
        )
        for (setting, blocks), point in rows.items()
        if blocks < depth
    ]
    columns = (_NAMES[name].lower(), "blocks", "nats a token", "plans", "accuracy %", "paper %")
    return Sheet.of(f"Ablation: {_NAMES[name].lower()}", columns, body)


def _panels(
    name: str, points: Sequence[dict[str, Any]], theirs: Sequence[Row]
) -> list[dict[str, Any]]:
    panels = []
    for field, scale, label in (
        ("cross_entropy", 1.0, "Cross-entropy (nats a token)"),
        ("value", 100.0, "Average accuracy (%)"),
    ):
        own = [point for point in points if field in point and removed(point)]
        own.sort(key=lambda point: -point["blocks"])
        lines = _lines(points, own, removed, number(field, times=scale))
        panels += [panel("This model", REMOVED, label, lines)] if own else []
    x, y = removed_by(ABLATED), number("average")
    reported = _lines(theirs, theirs, x, y, paper=True)
    return [*panels, panel(f"The paper: {ABLATED}", REMOVED, "Average accuracy (%)", reported)]


def _lines(
    every: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    x: Figure,
    y: Figure,
    *,
    paper: bool = False,
) -> list[dict[str, Any]]:
    """A line for each setting, in the order of all rows."""
    return [
        line(setting, [row for row in rows if row["setting"] == setting], x, y, paper=paper)
        for setting in dict.fromkeys(row["setting"] for row in every)
    ]
