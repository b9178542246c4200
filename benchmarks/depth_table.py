"""README's table of what depth costs, from the records of the model that ships.

python benchmarks/depth_table.py
"""

from pathlib import Path

from buddy.records import read_record

RESULTS = Path(__file__).parent.parent / "results"
DEPTHS = (30, 26, 22, 18, 15)
ROWS = (
    ("Alpaca prompts, nats", "training/kept-10100.json", "all", "nll", "{:.2f}", 1),
    ("tasks, nats", "training/unseen-10100.json", "all", "nll", "{:.2f}", 1),
    ("tasks, accuracy in %", "eval/tasks-shipped.json", "average", "acc", "{:.1f}", 100),
)


def by_depth(record, task, metric):
    """Values of an evaluation by blocks: at full depth, and routed."""
    return {
        point["blocks"]: point["value"]
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


if __name__ == "__main__":
    print(table())
