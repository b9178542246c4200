"""What the Budget Predictor keeps of each task's accuracy: the eight tasks, MMLU and GSM8K."""

from collections.abc import Mapping
from typing import Any, Final

from buddy.lab.commonsense import COMMONSENSE, metric_of
from buddy.lab.paper import panels
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

_ROWS: Final = {"tasks": 20, "mmlu": 1, "gsm8k": 12}
"""Rows of each task, or of each subject, with the quick settings."""
_SHOWN: Final = (*COMMONSENSE, "average", "mmlu", "gsm8k")
Figures = Mapping[str, dict[str, Any]]
"""A point of each task, in the metric that it is compared by."""


def collect(run: Run) -> Collected:
    """Measure the model under `auto` and at full depth, and its untuned base at full depth."""
    model, base = run.request.model, run.base()
    rows = {name: run.rows(quick, None) for name, quick in _ROWS.items()}
    own = [_measure(run, name, model, rows[name], ("1.0", "auto")) for name in _ROWS]
    untuned = own
    if base != model:
        untuned = [_measure(run, f"{name}-untuned", base, rows[name], ("1.0",)) for name in _ROWS]
    points = [point for results in own for point in results["points"]]
    whole, chosen = (
        _by_task([point for point in points if ("budget" in point) == is_auto])
        for is_auto in (False, True)
    )
    dense = _by_task([point for part in untuned for point in part["points"]])
    kept = _by_task([point for results in own for point in results["kept"]])
    body = [
        (
            task,
            panels.shown(dense[task]),
            panels.shown(whole[task]),
            panels.shown(chosen[task]),
            f"{panels.ran(chosen[task]):.1f}",
            "-" if kept[task]["value"] is None else panels.shown(kept[task]),
            _share(chosen[task]["value"], dense[task]["value"]),
        )
        for task in _SHOWN
    ]
    nothing = [task for task in _SHOWN if kept[task]["value"] is None]
    columns = ("task", "untuned", "full depth", "auto", "blocks", "kept %", "of untuned %")
    return Collected(
        results={
            "points": [
                part[task] for task in _SHOWN if task not in nothing for part in (whole, chosen)
            ],
            "kept": [kept[task] for task in _SHOWN],
            "untuned": [dense[task] for task in _SHOWN],
        },
        sheets=(Sheet.of("Accuracy under auto, %", columns, body),),
        facts=None,
        settings={"rows": rows, "base": base},
        differs=f"Full depth has no right answer of {' and '.join(nothing)}: nothing can be kept."
        if nothing
        else "",
    )


def _measure(
    run: Run, name: str, model: str, rows: int | None, budgets: tuple[str, ...]
) -> dict[str, Any]:
    """The results of one evaluation of one model."""
    record = run.buddy(
        f"retention-{name}",
        "eval",
        name.partition("-")[0],
        *("--model", model),
        *(part for budget in budgets for part in ("-b", budget)),
        *run.data(),
        *(() if rows is None else ("--limit", str(rows))),
        model=model,
    )
    results: dict[str, Any] = record["results"]
    return results


def _by_task(points: list[dict[str, Any]]) -> Figures:
    return {point["task"]: point for point in points if point["metric"] == metric_of(point["task"])}


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.1f}" if whole else "-"
