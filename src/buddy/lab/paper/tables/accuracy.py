"""The main table, and GSM8K: every method at every depth, beside what the paper reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from buddy.lab.commonsense import COMMONSENSE, GSM8K
from buddy.lab.paper import panels
from buddy.lab.paper.levels import budget_at, budgets_of, flags, level
from buddy.lab.paper.methods import ComparedMethod, by_model, check_labels
from buddy.lab.paper.orders import STATIC, measure_order
from buddy.lab.paper.published.read import TASK_NAMES, Row, like, read_paper
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

DENSE: Final = "Dense"
TUNED: Final = "Dense, tuned"
BUDDY: Final = "Buddy"
_PAPERS: Final = {
    "Shortened-LLaMA PPL": "Shortened-LLaMA",
    "Shortened-LLaMA Taylor+": "Shortened-LLaMA",
    TUNED: DENSE,
}
"""What the paper's tables call a method, where it is another name."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One of the two tables."""

    task: str
    metric: str
    command: tuple[str, ...]
    rows: int
    budgets: tuple[str, ...]
    what: str


_KINDS: Final = {
    "accuracy": TableSpec(
        "average", "acc", ("eval", "tasks"), 20, ("0.75", "0.5"), "Average accuracy"
    ),
    "gsm8k": TableSpec(
        "gsm8k",
        GSM8K,
        ("eval", "gsm8k"),
        12,
        ("0.875", "0.75"),
        "GSM8K exact match",
    ),
}


def collect(run: Run) -> Collected:
    """Measure what is not measured, one command for each model, and lay it side by side."""
    kind = _KINDS[run.request.table]
    methods = _methods(run)
    budgets = budgets_of(run.request.full, kind.budgets)
    if run.request.table == "gsm8k":
        budgets = kind.budgets
    rows = run.rows(kind.rows, None)
    limit = () if rows is None else ("--limit", str(rows))
    points: list[dict[str, Any]] = []
    dense_of: dict[str, str] = {}
    for place, (model, own, is_online) in enumerate(_groups(run, methods)):
        record = run.buddy(
            f"{run.request.table}-{place}",
            *kind.command,
            *("--model", model),
            *flags(() if is_online else budgets),
            *(part for method in own for part in ("--policy", f"{method.label}={method.policy}")),
            *run.data(),
            *limit,
            model=model,
        )
        dense = _dense(run, model, own)
        dense_of |= {method.label: dense for method in own}
        seen = {point["label"] for point in points}
        measured = [
            {**point, "label": dense if point["policy"] == "full" else point["label"]}
            for point in record["results"]["points"]
        ]
        points += [point for point in measured if point["label"] not in seen]
    paper = like(run.request.model, run.request.table)
    theirs = [row for row in read_paper(run.request.table) if row["model"] == paper]
    return Collected(
        results={
            "points": points,
            "panels": _panels(points, dense_of, kind, theirs),
            "paper": theirs,
        },
        sheets=_sheets(points, dense_of, kind, theirs, paper),
        facts=None,
        settings={
            "rows": rows,
            "budgets": list(budgets),
            "methods": [[method.label, method.policy, method.model] for method in methods],
            "paper": paper,
        },
        differs="" if run.outline().router else "The model has no router, so Buddy has no row.",
    )


def _methods(run: Run) -> list[ComparedMethod]:
    """Static ones and random masks on the untuned base; Buddy on the model; and what is asked."""
    base = run.base()
    names = STATIC if run.request.full or run.request.table == "accuracy" else STATIC[:2]
    methods = [
        ComparedMethod(label=name, policy=f"static:{measure_order(run, name)}", model=base)
        for name in names
    ]
    methods.append(ComparedMethod(label="Random", policy="random:0", model=base))
    if run.outline().router is not None:
        methods.append(ComparedMethod(label=BUDDY, policy="routed"))
    methods += run.request.methods
    check_labels(methods)
    return methods


def _groups(
    run: Run, methods: Sequence[ComparedMethod]
) -> list[tuple[str, list[ComparedMethod], bool]]:
    """What one command measures: a model, policies on it, and whether these decide online."""
    from buddy.policies.registry import build_policy

    groups = []
    for model, own in by_model(methods, run.request.model).items():
        outline = run.on(model).outline()
        spec = outline.policy_spec or "static"
        named = [replace(method, policy=method.policy or spec, model=None) for method in own]
        for online in (False, True):
            part = [
                method
                for method in named
                if build_policy(str(method.policy), outline.resources).is_online == online
            ]
            if part:
                groups.append((model, part, online))
    return groups


def _dense(run: Run, model: str, methods: Sequence[ComparedMethod]) -> str:
    """What full depth of a model is called."""
    if model == run.base():
        return DENSE
    return TUNED if model == run.request.model else f"{DENSE}, {methods[0].label}"


def _sheets(
    points: Sequence[dict[str, Any]],
    dense_of: Mapping[str, str],
    kind: TableSpec,
    theirs: Sequence[Row],
    paper: str,
) -> tuple[Sheet, ...]:
    cells = _cells(points, kind.task, kind.metric)
    full = {label: point["value"] for (label, _), point in cells.items() if label.startswith(DENSE)}
    body = []
    for (label, _), point in cells.items():
        blocks = point["blocks"]
        reported, kept_share = _reported(theirs, label, blocks, _depth(points), kind)
        # Of the same weights at full depth; a method that keeps no budget was not run there.
        dense = full.get(dense_of.get(label, label)) or full.get(DENSE)
        shares = [
            f"{100 * point['value'] / whole:.1f}" if whole else ""
            for whole in (dense, full.get(DENSE))
        ]
        body.append((label, blocks, panels.shown(point), *shares, reported, kept_share))
    # The paper's share is of its dense model, which nothing was tuned on.
    columns = ("method", "blocks", "here", "kept %", "of Dense %", "paper", "kept %")
    sheets = [Sheet.of(f"{kind.what}, %; paper: {paper}", columns, body)]
    if kind.task == "average":
        by_task = {name: _cells(points, name, metric) for name, metric in COMMONSENSE.items()}
        detail = [
            (
                condition[0],
                point["blocks"],
                *(f"{panels.percent(by_task[task][condition]):.1f}" for task in TASK_NAMES),
            )
            for condition, point in cells.items()
        ]
        names = ("method", "blocks", *TASK_NAMES.values())
        sheets.append(Sheet.of("By task, %", names, detail))
    return tuple(sheets)


def _cells(
    points: Sequence[dict[str, Any]], task: str, metric: str
) -> dict[tuple[str, int | None], dict[str, Any]]:
    """Points by label and budget; by label alone where a method keeps none: depths vary by task."""
    return {
        (point["label"], None if "mean_blocks" in point else point["blocks"]): point
        for point in points
        if (point["task"], point["metric"]) == (task, metric)
    }


def _depth(points: Sequence[dict[str, Any]]) -> int:
    return int(points[0]["num_blocks"])


def _reported(
    theirs: Sequence[Row], label: str, blocks: int, num_blocks: int, kind: TableSpec
) -> tuple[str, str]:
    """The paper's figure at the same share of blocks, and what it keeps of its dense model's."""
    named = _PAPERS.get(label, label)
    dense = float(next(row for row in theirs if row["method"] == DENSE)[kind.task])
    wanted = budget_at(blocks, num_blocks)
    for row in theirs:
        if row["method"] == named and level(row, list(theirs)) == wanted:
            value = float(row[kind.task])
            return f"{value:.1f}", f"{100 * value / dense:.1f}"
    return "", ""


def _panels(
    points: Sequence[dict[str, Any]],
    dense_of: Mapping[str, str],
    kind: TableSpec,
    theirs: Sequence[Row],
) -> list[dict[str, Any]]:
    wanted = (kind.task, kind.metric)
    chosen = [point for point in points if (point["task"], point["metric"]) == wanted]
    chosen.sort(key=panels.ran, reverse=True)
    labels = list(dict.fromkeys(point["label"] for point in points if point["label"] in dense_of))
    ours = []
    for label in labels:
        own = [point for point in chosen if point["label"] in (label, dense_of[label])]
        ours.append(
            panels.line(label, own, panels.removed, panels.percent, stderr=panels.percent_error)
        )
    model = theirs[0]["model"]
    start_row = next(row for row in theirs if row["method"] == DENSE)
    reported = []
    for name in dict.fromkeys(row["method"] for row in theirs if row["method"] != DENSE):
        rows = [start_row, *(row for row in theirs if row["method"] == name)]
        label = (
            "Shortened-LLaMA PPL" if name == "Shortened-LLaMA" and "PPL" in str(labels) else name
        )
        reported.append(
            panels.line(label, rows, panels.removed_by(model), panels.number(kind.task), paper=True)
        )
    return [
        panels.panel("This model", panels.REMOVED, f"{kind.what} (%)", ours),
        panels.panel(f"The paper: {model}", panels.REMOVED, f"{kind.what} (%)", reported),
    ]
