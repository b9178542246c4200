"""What depth costs: the tables of README and docs/benchmarks/quality.md, from the records.

python benchmarks/depth_table.py
"""

from pathlib import Path

from buddy.lab import experiment
from buddy.records import read_record

RESULTS = Path(__file__).parent.parent / "results"
DEPTHS = (30, 26, 22, 18, 15)
ROWS = (
    ("Alpaca, loss", "training/kept-10100.json", "all", "nll", "{:.2f}", 1),
    ("nine tasks, loss", "training/unseen-10100.json", "all", "nll", "{:.2f}", 1),
    ("eight tasks, accuracy in %", "eval/tasks-shipped.json", "average", "acc", "{:.1f}", 100),
)


def by_depth(record, task, metric, field="value"):
    """Values of an evaluation by blocks, or their errors: at full depth, and routed."""
    return {
        point["blocks"]: point[field]
        for point in record["results"]["points"]
        if (point["task"], point["metric"]) == (task, metric)
        and point["label"] in ("full", "routed")
    }


def table():
    """The table as README has it."""
    lines = [
        f"| blocks of 30 | {' | '.join(map(str, DEPTHS))} |",
        f"|---|{'---:|' * len(DEPTHS)}",
    ]
    for title, name, task, metric, form, scale in ROWS:
        values = by_depth(read_record(RESULTS / name), task, metric)
        cells = [form.format(scale * values[blocks]) for blocks in DEPTHS]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses():
    """Nats a token, and in brackets the mean over answers; prompts at the depth, and at full."""
    rows = (
        ("Alpaca prompts", "kept-10100", "routed"),
        ("the same, prompt at full depth", "kept-10100", "routed, prompt at 30"),
        ("tasks", "unseen-10100", "routed"),
    )
    depths = (30, 26, 24, 22, 18, 15)
    lines = []
    for title, name, label in rows:
        points = {
            (point["label"], point["blocks"], point["metric"]): point["value"]
            for point in read_record(RESULTS / f"training/{name}.json")["results"]["points"]
            if point["task"] == "all"
        }
        if label == "routed":
            points |= {("routed", 30, m): points["full", 30, m] for m in ("nll", "answer_nll")}
        lines.append((title, *(loss(points, label, depth) for depth in depths)))
    return experiment.markdown(("blocks of 30", *depths), lines)


def loss(points, label, depth):
    """Both means; nothing where it was not measured."""
    if (label, depth, "nll") not in points:
        return ""
    return f"{points[label, depth, 'nll']:.2f} ({points[label, depth, 'answer_nll']:.2f})"


def accuracy():
    """Percent on the eight tasks: untuned, by depth, and under the predictor."""
    untuned = by_depth(read_record(RESULTS / "eval/static-tasks.json"), "average", "acc")
    shipped = read_record(RESULTS / "eval/tasks-shipped.json")
    depths = by_depth(shipped, "average", "acc")
    (auto,) = [
        point["value"]
        for point in shipped["results"]["points"]
        if (point["label"], point["task"]) == ("routed auto", "average")
    ]
    values = (untuned[30], *(depths[blocks] for blocks in DEPTHS), auto)
    head = ("blocks of 30", "30, untuned", *DEPTHS, "`auto`, 22 on average")
    return experiment.markdown(head, [("accuracy, %", *(f"{100 * v:.1f}" for v in values))])


if __name__ == "__main__":
    print("\n\n".join((table(), losses(), accuracy())))
