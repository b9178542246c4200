"""The paper's tasks: eight of commonsense, and which metric of each their average takes; GSM8K."""

from typing import Final

COMMONSENSE: Final = {
    "openbookqa": "acc_norm",
    "piqa": "acc_norm",
    "boolq": "acc",
    "social_iqa": "acc",
    "hellaswag": "acc_norm",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "winogrande": "acc",
}
"""Metric by task.

Source: the tasks are the paper's; it names no metric. Its dense Llama-3-8B row agrees with the
figures that lm-eval gives under these.
"""

GSM8K: Final = "exact_match,flexible-extract"
"""Metric of GSM8K: the last number of an answer is the right one."""


def metric_of(task: str) -> str:
    """The metric that a task is compared by."""
    return {**COMMONSENSE, "gsm8k": GSM8K}.get(task, "acc")
