"""How many distinct inference paths there are, by depth: over prompts, and over their answers."""

import statistics
from collections.abc import Sequence
from typing import Any

from buddy.data.examples import Example
from buddy.lab.paper.levels import BUDGETS, blocks_of
from buddy.lab.paper.panels import REMOVED, line, panel, removed
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
                line(label, *_xy(points, name, field, num_blocks))
                for field, label in (("of_prompts", "prompts"), ("of_tokens", "prompts and tokens"))
            ],
        )
        for name in sets
    ]
    body = [
        (
            _title(point["prompts"]),
            str(point["blocks"]),
            f"{removed(point['blocks'], num_blocks):.0f} %",
            str(point["inputs"]),
            str(point["of_prompts"]),
            str(point["of_tokens"]),
            f"{point['per_answer']:.2f}",
        )
        for point in points
        if point["blocks"] in {blocks_of(budget, num_blocks) for budget in BUDGETS}
    ]
    columns = ("prompts", "blocks", "removed", "inputs", "paths", "with tokens", "in an answer")
    return Collected(
        results={"points": points, "panels": panels},
        sheets=(Sheet(title="Distinct inference paths", columns=columns, rows=tuple(body)),),
        facts=model.facts(),
        settings=settings,
    )


def _title(name: str) -> str:
    return {"alpaca": "Alpaca", "samsum": "SAMSum"}[name]


def _xy(
    points: Sequence[dict[str, Any]], name: str, field: str, num_blocks: int
) -> tuple[list[float], list[float]]:
    own = [point for point in points if point["prompts"] == name]
    return [removed(one["blocks"], num_blocks) for one in own], [float(one[field]) for one in own]


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
    """By depth: distinct plans of prompts, of prompts and answer tokens, and within an answer."""
    from buddy.lab.paper.routes import routes_of

    model = run.model()
    routes = [routes_of(model, one, depths, answer_tokens=_ANSWER_TOKENS) for one in examples]
    return [
        {
            "blocks": depth,
            "num_blocks": model.num_blocks,
            "inputs": len(examples),
            "of_prompts": len({found[place][0] for found in routes}),
            "of_tokens": len({plan for found in routes for plan in found[place]}),
            "per_answer": statistics.fmean(len(set(found[place])) for found in routes),
        }
        for place, depth in enumerate(depths)
    ]
