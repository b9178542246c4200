"""How many distinct inference paths there are, by depth: over prompts, and over their answers."""

import statistics
from collections.abc import Sequence
from typing import Any

from buddy.data.examples import Example
from buddy.lab.paper.levels import BUDGETS, blocks_of
from buddy.lab.paper.panels import REMOVED, line, number, panel, removed
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

_ANSWER_TOKENS = 128


def collect(run: Run) -> Collected:
    """Count paths of Alpaca and SAMSum prompts at every depth from half the blocks on."""
    model = run.model()
    num_blocks = model.num_blocks
    depths = list(range(num_blocks - 1, max(3, num_blocks // 2) - 1, -1))
    rows = run.rows(200, 1000)
    settings = {"depths": depths, "rows": rows, "answer_tokens": _ANSWER_TOKENS}
    points = run.measure("routes", settings, lambda: _count(run, depths, rows))["points"]
    sets = list(dict.fromkeys(point["prompts"] for point in points))
    panels = [
        panel(
            f"Distinct paths ({_title(name)})",
            REMOVED,
            "Paths",
            [
                line(
                    label,
                    [point for point in points if point["prompts"] == name],
                    removed,
                    number(field),
                )
                for field, label in (("of_prompts", "prompts"), ("of_tokens", "prompts and tokens"))
            ],
        )
        for name in sets
    ]
    body = [
        (
            _title(point["prompts"]),
            point["blocks"],
            f"{removed(point):.0f} %",
            *(point[name] for name in ("inputs", "of_prompts", "of_tokens")),
            f"{point['per_answer']:.2f}",
        )
        for point in points
        if point["blocks"] in {blocks_of(budget, num_blocks) for budget in BUDGETS}
    ]
    columns = ("prompts", "blocks", "removed", "inputs", "paths", "with tokens", "in an answer")
    return Collected(
        results={"points": points, "panels": panels},
        sheets=(Sheet.of("Distinct inference paths", columns, body),),
        facts=model.facts(),
        settings=settings,
    )


def _title(name: str) -> str:
    return {"alpaca": "Alpaca", "samsum": "SAMSum"}[name]


def _count(run: Run, depths: Sequence[int], rows: int | None) -> dict[str, Any]:
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.paper.inputs import ALPACA, MOST_TOKENS, SAMSUM, read_alpaca, read_samsum

    tokenizer, folder = load_tokenizer(run.request.model), run.request.data_dir
    longest = min(MOST_TOKENS, run.model().config.max_position_embeddings)
    sets = {
        ALPACA: read_alpaca(folder, tokenizer, rows, longest),
        SAMSUM: read_samsum(folder, tokenizer, rows, longest),
    }
    return {
        "points": [
            {"prompts": name, **point}
            for name, examples in sets.items()
            for point in count_paths(run, examples, depths)
        ]
    }


def count_paths(
    run: Run, examples: Sequence[Example], depths: Sequence[int]
) -> list[dict[str, Any]]:
    """Distinct plans of prompts, of prompts and answer tokens, and within an answer, by depth."""
    from buddy.lab.paper.routes import routes_of

    model = run.model()
    routes = [routes_of(model, row, depths, answer_tokens=_ANSWER_TOKENS) for row in examples]
    return [
        {
            "blocks": depth,
            "num_blocks": model.num_blocks,
            "inputs": len(examples),
            "of_prompts": len({route[place][0] for route in routes}),
            "of_tokens": len({plan for route in routes for plan in route[place]}),
            "per_answer": statistics.fmean(len(set(route[place])) for route in routes),
        }
        for place, depth in enumerate(depths)
    ]
