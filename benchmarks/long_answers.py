"""How many answers survive a missing block, by how many steps their reference solutions take?

Reads what `buddy eval gsm8k` kept of each question beside its records. A step is a line of the
reference solution; errors are binomial.

    buddy eval gsm8k -m MODEL -b "27 blocks" … --limit 100 --data-dir DATA --out runs/long.json
    python benchmarks/long_answers.py runs/long.samples.jsonl --data-dir DATA --out RECORD
"""

import json
import math
from pathlib import Path

from route_rows import read

from buddy.lab import experiment

STEPS = {"1 or 2": range(1, 3), "3": range(3, 4), "4 or more": range(4, 100)}
METRIC = "exact_match,flexible-extract"


def answered(path):
    """Whether each question was answered right, by (policy, blocks) and its place in the file."""
    rows = read(path)
    conditions = [row["condition"] for row in rows if "condition" in row]
    named = {each["key"]: (each["label"], each["blocks"]) for each in conditions}
    found = {}
    for row in rows:
        if METRIC in row.get("scores", ()):
            name = named[row["key"].split(" ")[0]]
            found.setdefault(name, {})[row["doc_id"]] = row["scores"][METRIC]
    return found


def points(found, steps):
    """Accuracy by policy, blocks and steps, deepest first."""
    for (policy, blocks), right in sorted(found.items(), key=lambda item: (-item[0][1], item[0])):
        for name, wanted in {"all": range(100), **STEPS}.items():
            own = [value for place, value in right.items() if steps[place] in wanted]
            value = sum(own) / len(own)
            error = math.sqrt(value * (1 - value) / (len(own) - 1))
            yield {
                "policy": policy,
                "blocks": blocks,
                "steps": name,
                "questions": len(own),
                "accuracy": value,
                "stderr": error,
            }


def table(made):
    """A row of each policy and depth, a column for each number of steps."""
    names = ["all", *STEPS]
    cells = {(point["policy"], point["blocks"], point["steps"]): point for point in made}
    first = {name: next(p for p in made if p["steps"] == name)["questions"] for name in names}
    head = ("blocks", "order", *(f"{name} ({count})" for name, count in first.items()))
    rows = [
        (
            str(blocks),
            policy,
            *(
                f"{100 * cells[policy, blocks, name]['accuracy']:.0f} ± "
                f"{100 * cells[policy, blocks, name]['stderr']:.0f}"
                for name in names
            ),
        )
        for policy, blocks in dict.fromkeys((p["policy"], p["blocks"]) for p in made)
    ]
    return experiment.markdown(head, rows, texts=2)


def main():
    """Join, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("samples", type=Path, nargs="+", help="of runs of the same questions")
    parser.add_argument("--data-dir", type=Path, required=True)
    args = parser.parse_args()
    rows = read(args.data_dir / "gsm8k" / "test.jsonl")
    steps = [len(row["answer"].strip().splitlines()) - 1 for row in rows]
    found = {name: right for path in args.samples for name, right in answered(path).items()}
    made = list(points(found, steps))
    (runs,) = {json.dumps(read(path)[0]["run"], sort_keys=True) for path in args.samples}
    config = {**experiment.texts(args), "samples": [path.name for path in args.samples]}
    experiment.save(args.out, "long-answers", {"points": made}, config=config | json.loads(runs))
    print(table(made))


if __name__ == "__main__":
    experiment.run(main)
