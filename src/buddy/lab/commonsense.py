"""The eight commonsense tasks of the paper, and which metric of each their average takes."""

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
