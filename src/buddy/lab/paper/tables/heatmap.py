"""How often each block runs, at four depths, on the questions of the eight tasks."""

from typing import Any

from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.paper.levels import BUDGETS
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet


def collect(run: Run) -> Collected:
    """Route the questions; nothing beyond the router's own layer need run."""
    rows = run.rows(100, None)
    settings = {"rows": rows, "budgets": list(BUDGETS)}
    entries = run.measure("execution", settings, lambda: _route(run, rows))["execution"]
    body = []
    for entry in entries:
        varies = [block for block, rate in enumerate(entry["rates"]) if 0 < rate < 1]
        never = [block for block, rate in enumerate(entry["rates"]) if rate == 0]
        body.append(
            (
                entry["task"],
                str(entry["blocks"]),
                str(entry["inputs"]),
                str(entry["distinct_plans"]),
                str(len(varies)),
                str(len(never)),
            )
        )
    columns = ("task", "blocks", "inputs", "plans", "varying blocks", "never run")
    return Collected(
        results={"execution": entries},
        sheets=(Sheet(title="Execution of blocks", columns=columns, rows=tuple(body)),),
        facts=run.model().facts(),
        settings=settings,
    )


def _route(run: Run, rows: int | None) -> dict[str, Any]:
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.evaluation.conditions import plan_conditions
    from buddy.lab.evaluation.execution import execution_rates
    from buddy.lab.paper.inputs import MOST_TOKENS, read_tasks
    from buddy.lab.paper.routes import Plan, routes_of

    model, request = run.model(), run.request
    examples = read_tasks(
        list(COMMONSENSE),
        request.data_dir,
        load_tokenizer(request.model),
        rows,
        min(MOST_TOKENS, model.config.max_position_embeddings),
        run.path("questions.jsonl"),
    )
    conditions = plan_conditions(model, (), BUDGETS)
    depths = [condition.blocks for condition in conditions]
    plans: list[dict[str, list[Plan]]] = [{} for _ in depths]
    for one in examples:
        for own, route in zip(plans, routes_of(model, one, depths, answer_tokens=0), strict=True):
            own.setdefault(one.source, []).append(route[0])
    return {
        "execution": [
            entry
            for condition, own in zip(conditions, plans, strict=True)
            for entry in execution_rates(condition, own)
        ]
    }
