"""Recipes of the training runs that tables need, as TOML."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from buddy.lab.paper.inputs import ALPACA_FILE, ALPACA_HUB
from buddy.lab.paper.run import Run

HELD_OUT: Final = 512
"""Alpaca's first rows are never trained on."""
PAPER_DEPTHS: Final = ["0.875", "0.75", "0.625", "0.5"]


def alpaca(run: Run, start: int, stop: int | None, template: str) -> dict[str, Any]:
    """Rows of Alpaca as a recipe names them."""
    folder = run.request.data_dir
    rows: dict[str, Any] = {"start": start, "template": template}
    rows |= {"hub": ALPACA_HUB} if folder is None else {"path": f"{folder}/{ALPACA_FILE}.jsonl"}
    return rows if stop is None else {**rows, "stop": stop}


def weights(run: Run, model: str) -> dict[str, Any]:
    """A model as a recipe names it."""
    dtype = run.request.dtype
    return {"name": model} if dtype is None else {"name": model, "dtype": dtype}


def template_of(model: str) -> str:
    """How a model is asked."""
    from buddy.checkpoint.resolve import load_tokenizer
    from buddy.lab.paper import inputs

    return inputs.template_of(load_tokenizer(model))


def stage_1(run: Run, router: Mapping[str, Any], *, steps: int) -> str:
    """A short run on short rows; with `--full` the paper's recipe.

    Args:
        run: Says which model and data.
        router: Settings of the router, those of the planner within.
        steps: Of a quick run.
    """
    template, full = template_of(run.base()), run.request.full
    quick: dict[str, Any] = {
        "steps": steps,
        "batch_size": 4,
        "warmup_steps": 10,
        "learning_rate": 2e-3,
    }
    quick |= {"router_learning_rate": 1e-3, "schedule": "cosine", "loss": "example"}
    stop = None if full else HELD_OUT + 4 * steps
    return to_toml(
        {
            "model": weights(run, run.base()),
            "data": {
                "max_tokens": _longest(run, 512 if full else 64),
                "train": [alpaca(run, HELD_OUT, stop, template)],
                "validation": [alpaca(run, 0, HELD_OUT, template)],
            },
            "router": {"relaxation": "softmax", **router},
            "budget": {"choices": ["1.0", *PAPER_DEPTHS]} if full else {},
            "optim": {} if full else quick,
            "log": {
                "evaluate_every": 0,
                "evaluate_budgets": PAPER_DEPTHS,
                "evaluate_rows": 256 if full else 64,
                "tensorboard": False,
            },
        }
    )


def _longest(run: Run, wanted: int) -> int:
    return min(wanted, int(run.outline().config.max_position_embeddings))


def stage_2(run: Run, checkpoint: str, *, steps: int | None = None) -> str:
    """The paper's settings with `--full`; else few prompts, and a cost that is worth saving.

    Args:
        run: Says which data.
        checkpoint: With a router.
        steps: In place of the settings' own; then the model runs at every step.
    """
    template, full = template_of(checkpoint), run.request.full
    paper = full or steps is not None
    quick: dict[str, Any] = {"steps": 400, "batch_size": 16, "learning_rate": 3e-4}
    train = None if paper else HELD_OUT + 96
    tables: dict[str, Any] = {
        "model": weights(run, checkpoint),
        "data": {
            "max_tokens": _longest(run, 512 if paper else 128),
            "train": [alpaca(run, HELD_OUT, train, template)],
            "validation": [] if steps else [alpaca(run, 0, HELD_OUT, template)],
        },
        "grpo": {} if paper else {"lambda_cost": 12.0, "entropy": 0.3},
        "optim": {} if paper else quick,
        "log": {
            "every": 50 if full else 10,
            "evaluate_every": 0,
            "evaluate_rows": 128 if full else 32,
            "tensorboard": False,
        },
    }
    if steps is not None:
        tables["optim"] = {"steps": steps, "standardise": False}
        tables["log"]["every"] = 1
        tables["data"]["train"] = [alpaca(run, HELD_OUT, HELD_OUT + 64, template)]
    if paper:
        tables["measure"] = {"precompute": False}
    return to_toml(tables)


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values, of lists of them, of tables and of lists of tables."""
    lines: list[str] = []
    for name, table in tables.items():
        plain = {key: value for key, value in table.items() if not _is_nested(value)}
        lines += [f"[{name}]", *_values(plain)]
        for key, value in table.items():
            if isinstance(value, Mapping):
                lines += [f"[{name}.{key}]", *_values(value)]
            elif _is_nested(value):
                for item in value:
                    lines += [f"[[{name}.{key}]]", *_values(item)]
    return "\n".join(lines) + "\n"


def _is_nested(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, Mapping) or (
        is_list and any(isinstance(item, Mapping) for item in value)
    )


def _values(values: Mapping[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and lists are TOML's too.
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
