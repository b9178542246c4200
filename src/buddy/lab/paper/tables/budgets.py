"""What the Budget Predictor spends: a histogram of its budgets for each task."""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from buddy.lab.commonsense import COMMONSENSE
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

_EDGES: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
INTERVALS: Final = ("to 20 %", "20 to 40 %", "40 to 60 %", "60 to 80 %", "above 80 %")


def collect(run: Run) -> Collected:
    """Ask the predictor for every prompt; nothing beyond the router's own layer need run."""
    rows = run.rows(100, None)
    settings = {"rows": rows}
    chosen = run.measure("chosen", settings, lambda: _choose(run, rows))["tasks"]
    num_blocks = run.model().num_blocks
    chosen.sort(key=lambda task: -statistics.fmean(task["blocks"]))
    shares = {task["task"]: histogram(task["blocks"], num_blocks) for task in chosen}
    body = [
        (
            task["task"],
            len(task["blocks"]),
            f"{statistics.fmean(task['blocks']):.1f}",
            *(f"{100 * share:.0f}" for share in shares[task["task"]]),
        )
        for task in chosen
    ]
    bars = {
        "x_label": "Share of prompts (%)",
        "parts": list(INTERVALS),
        "rows": [
            {"label": task, "values": [100 * share for share in own]}
            for task, own in shares.items()
        ],
    }
    columns = ("task", "inputs", "blocks", *INTERVALS)
    title = f"Budgets of the predictor, % of prompts; of {num_blocks} blocks"
    return Collected(
        results={"tasks": chosen, "bars": bars},
        sheets=(Sheet.of(title, columns, body),),
        facts=run.model().facts(),
        settings=settings,
    )


def histogram(blocks: Sequence[int], num_blocks: int) -> list[float]:
    """The share of budgets in each fifth of full depth; an edge belongs to the fifth below it."""
    counts = [0] * len(_EDGES)
    for own in blocks:
        counts[next(i for i, edge in enumerate(_EDGES) if own <= edge * num_blocks + 1e-9)] += 1
    return [count / len(blocks) for count in counts]


def _choose(run: Run, rows: int | None) -> dict[str, Any]:
    import torch

    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.paper.inputs import MOST_TOKENS, read_alpaca, read_samsum, read_tasks

    model, request = run.model(), run.request
    tokenizer = load_tokenizer(request.model)
    longest = min(MOST_TOKENS, model.config.max_position_embeddings)
    common = (request.data_dir, tokenizer)
    examples = [
        *read_tasks([*COMMONSENSE, "gsm8k"], *common, rows, longest, run.path("questions.jsonl")),
        *read_tasks(["mmlu"], *common, _a_subject(rows), longest, run.path("mmlu.jsonl")),
        *read_samsum(*common, rows, longest),
    ]
    sources = [example.source for example in examples]
    alpaca = read_alpaca(*common, rows or 1000, longest)
    blocks_of: dict[str, list[int]] = {}
    sources += ["alpaca"] * len(alpaca)
    for name, example in zip(sources, [*examples, *alpaca], strict=True):
        ids = torch.tensor([example.prompt], device=model.device)
        valid = torch.ones_like(ids, dtype=torch.bool)
        blocks_of.setdefault(name, []).extend(model.choose_budgets(ids, valid, valid))
    return {"tasks": [{"task": name, "blocks": blocks} for name, blocks in blocks_of.items()]}


def _a_subject(rows: int | None) -> int | None:
    """MMLU has 57 subjects."""
    return None if rows is None else max(1, rows // 57)
