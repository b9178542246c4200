"""Reads what the paper reports: one CSV file a table, facts alone."""

import csv
from importlib import resources
from typing import Final

NUM_BLOCKS: Final = {
    "Llama-1-13B": 40,
    "Llama-2-7B": 32,
    "Llama-3-8B": 32,
    "Qwen2.5-7B-Instruct": 28,
}
"""Blocks of the models that it measures."""
ABLATED: Final = "Llama-2-7B"
"""Its ablations are of this model; so are its speeds, as far as their size tells."""
TASK_NAMES: Final = {
    "openbookqa": "OBQA",
    "piqa": "PIQA",
    "boolq": "BoolQ",
    "social_iqa": "SIQA",
    "hellaswag": "HellaS",
    "arc_easy": "ARC-E",
    "arc_challenge": "ARC-C",
    "winogrande": "WinoG",
}
"""A column's name, by lm-eval's."""

Row = dict[str, str]


def read_paper(table: str) -> list[Row]:
    """The rows of one table, every cell as it is written.

    Args:
        table: Name of the file without its suffix. `accuracy` and `gsm8k` are in percent, `speed`
            in tokens/s, `breakdown` in ms and percent, `training-cost` in hours, and `ablations`
            has the average accuracy in percent. `removed` counts blocks.
    """
    file = resources.files("buddy.lab.paper.published") / f"{table}.csv"
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def like(model: str, among: str) -> str:
    """Which of the paper's models stands beside a model in a table.

    Args:
        model: As a caller names it.
        among: The table; not each has all models.

    Returns:
        The paper's model of that name; else the first of the table.
    """
    measured = list(dict.fromkeys(row["model"] for row in read_paper(among)))
    name = model.lower().replace("meta-", "")
    marks = {
        "Llama-1-13B": ("llama-13b", "llama-1-13b"),
        "Llama-2-7B": ("llama-2-7b",),
        "Llama-3-8B": ("llama-3-8b", "llama-3.1-8b"),
        "Qwen2.5-7B-Instruct": ("qwen2.5-7b",),
    }
    for known in measured:
        if any(mark in name for mark in marks[known]):
            return known
    return measured[0]
