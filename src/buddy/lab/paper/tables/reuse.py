"""Is it worth choosing again at every token? ROUGE of SAMSum summaries, both ways."""

from collections.abc import Sequence
from typing import Any, Final

from buddy.lab.paper import panels
from buddy.lab.paper.levels import budgets_of, flags
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

_METRICS: Final = {"rouge1": "ROUGE-1", "rougeL": "ROUGE-L"}
_WAYS: Final = {"step": "Recompute", "prefill": "Reuse"}


def collect(run: Run) -> Collected:
    """One `buddy eval rouge`."""
    rows = run.rows(16, None)
    budgets = budgets_of(run.request.full)
    room = int(run.outline().config.max_position_embeddings)
    new_tokens = min(100 if run.request.full else 48, room // 2)
    record = run.buddy(
        *("rouge", "eval", "rouge", "--model", run.request.model, "--policy", "routed"),
        *(*flags(budgets), *run.data()),
        *(() if rows is None else ("--limit", str(rows))),
        *("--max-new-tokens", str(new_tokens)),
        model=run.request.model,
    )
    results = record["results"]
    return Collected(
        results={**results, "panels": _panels(results["points"])},
        sheets=(_sheet(results),),
        facts=record["model"],
        settings={"rows": rows, "budgets": list(budgets)},
    )


def _panels(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    panels_made = []
    for metric, name in _METRICS.items():
        lines = []
        for way, label in _WAYS.items():
            own = [p for p in points if p["metric"] == metric and p["reroute"] in (way, None)]
            lines.append(
                panels.line(label, own, panels.removed, panels.percent, stderr=panels.percent_error)
            )
        panels_made.append(panels.panel(name, panels.REMOVED, f"{name}, F (%)", lines))
    return panels_made


def _sheet(results: dict[str, Any]) -> Sheet:
    values = {(p["blocks"], p["metric"], p["reroute"]): p["value"] for p in results["points"]}
    gains = {(gain["blocks"], gain["metric"]): gain for gain in results["differences"]}
    depths = list(dict.fromkeys(point["blocks"] for point in results["points"]))
    body = []
    for blocks in depths:
        for metric, name in _METRICS.items():
            both = values.get((blocks, metric, None))
            ways = [values.get((blocks, metric, way), both) for way in _WAYS]
            gain = gains.get((blocks, metric))
            body.append(
                (
                    name,
                    blocks,
                    *("" if value is None else f"{100 * value:.2f}" for value in ways),
                    "" if gain is None else panels.shown(gain, 2, "+"),
                )
            )
    columns = ("metric", "blocks", *_WAYS.values(), "difference")
    return Sheet.of("ROUGE F on SAMSum, %", columns, body)
