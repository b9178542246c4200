"""The docs' figure of quality by depth: loss, and accuracy above guessing.

python benchmarks/quality_figure.py docs/figures/quality.png
"""

import sys
from statistics import fmean

from depth_table import DEPTHS, RESULTS, by_depth

from buddy.lab.plots import style
from buddy.records import read_record

LOSSES = {"Alpaca prompts": "kept-10100", "tasks": "unseen-10100"}
CHOICES = {
    **{"piqa": 2, "boolq": 2, "winogrande": 2, "social_iqa": 3},
    **{"hellaswag": 4, "arc_easy": 4, "arc_challenge": 4, "openbookqa": 4},
}
"""Answers to choose from, by task."""


def points(name, task, metric):
    """(value, standard error) at each depth."""
    record = read_record(RESULTS / name)
    values, errors = (by_depth(record, task, metric, field) for field in ("value", "stderr"))
    return [(values[blocks], errors[blocks]) for blocks in DEPTHS]


def curve(axes, values, index, scale=1):
    """A line through the depths, with error bars."""
    means, errors = ([scale * part for part in parts] for parts in zip(*values, strict=True))
    return axes.errorbar(DEPTHS, means, errors, **style.look(index), capsize=2)


@style.in_paper_style
def draw(records, page):
    """Loss on the left, accuracy on the right."""
    figure = page.figure(2.0)
    loss, accuracy = figure.subplots(1, 2)
    handles = [
        curve(loss, points(f"training/{name}.json", "all", "nll"), index)
        for index, name in enumerate(LOSSES.values())
    ]
    loss.set_ylabel("Loss, nats per token")
    handles.append(curve(accuracy, points("eval/tasks-shipped.json", "average", "acc"), 2, 100))
    guess = 100 * fmean(1 / choices for choices in CHOICES.values())
    handles.append(accuracy.axhline(guess, color=style.GREY, linestyle=(0, (4, 2)), linewidth=0.8))
    accuracy.set_ylabel("Accuracy, mean of 8 tasks (%)")
    accuracy.set_ylim(34, 52)
    for axes in (loss, accuracy):
        axes.set_xlabel("Executed blocks")
        axes.set_xticks(DEPTHS)
        axes.invert_xaxis()
        axes.grid(visible=True)
    style.legend_below(figure, handles, [*LOSSES, "eight tasks", "guessing"])
    return figure


if __name__ == "__main__":
    draw([], width=4.6).savefig(sys.argv[1], dpi=200)
