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
    body = [
        (
            *(entry[name] for name in ("task", "blocks", "inputs", "distinct_plans")),
            sum(0 < rate < 1 for rate in entry["rates"]),
            entry["rates"].count(0),
        )
        for entry in entries
    ]
    columns = ("task", "blocks", "inputs", "plans", "varying blocks", "never run")
    return Collected(
        results={"execution": entries},
        sheets=(Sheet.of("Execution of blocks", columns, body),),
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
    for example in examples:
        routes = routes_of(model, example, depths, answer_tokens=0)
        for own, route in zip(plans, routes, strict=True):
            own.setdefault(example.source, []).append(route[0])
    return {
        "execution": [
            entry
            for condition, own in zip(conditions, plans, strict=True)
            for entry in execution_rates(condition, own)
        ]
    }
