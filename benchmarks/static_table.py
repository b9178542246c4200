"""What does removing blocks cost, by method? The tables of docs/benchmarks/static-pruning.md."""

from pathlib import Path

from buddy.lab import experiment
from buddy.records import read_record

LABELS = {
    "sleb": "SLEB",
    "ppl": "Shortened LLaMA, PPL, no block protected",
    "ppl+": "Shortened LLaMA, PPL+",
    "taylor": "Shortened LLaMA, Taylor, no block protected",
    "taylor+": "Shortened LLaMA, Taylor+",
    "shortgpt": "ShortGPT",
    "cosine": "cosine of the summary, the base model's prior",
    "fisher": "Fisher",
    "grad-norm": "gradient norm",
    "prior": "cosine of the summary, the base model's prior",
    "random": "random, another set for every input",
}


def main():
    """Print both tables as Markdown."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("ppl", type=Path)
    args = parser.parse_args()
    print(accuracy_table(args.tasks))
    print()
    print(perplexity_table(args.ppl))


def accuracy_table(path):
    """The eight tasks' average, in percent."""
    return table(path, "average", "acc", 100.0)


def perplexity_table(path):
    """The perplexity of WikiText-2."""
    return table(path, "wikitext2", "perplexity", 1.0)


def table(path, task, metric, scale):
    """One row a method, one column a number of removed blocks."""
    points = [
        point
        for point in read_record(path)["results"]["points"]
        if (point["task"], point["metric"]) == (task, metric)
    ]
    removed = sorted({point["num_blocks"] - point["blocks"] for point in points})
    cells = {(p["label"], p["num_blocks"] - p["blocks"]): p for p in points}
    rows = []
    for label, title in LABELS.items():
        row = [cells.get(("full", count)) or cells.get((label, count)) for count in removed]
        is_new = title not in [first for first, *_ in rows]
        if is_new and any((label, count) in cells for count in removed):
            shown = [cell(p["value"] * scale, p["stderr"] * scale) if p else "" for p in row]
            rows.append((title, *shown))
    head = ("removed of 30", *removed)
    return experiment.markdown(head, rows, texts=len(head))


def cell(value, error):
    """A value with as many digits as its error bears."""
    digits = 1 if value < 200 else 0
    return f"{value:,.{digits}f} ± {error:,.{digits}f}"


if __name__ == "__main__":
    experiment.run(main)
