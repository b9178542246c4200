"""The docs' tables of what a router for frozen weights gains, from the record of its run.

python benchmarks/route_table.py results/routing/smollm2-135m.json
"""

import sys
from pathlib import Path

from buddy.records import read_record

HEADS = ("full depth", "order before", "one searched", "best single", "routed", "gain")


def row(name, figures):
    """One line: losses, and what routing gains over the best single order."""
    losses = [f"{figures[key]:.3f}" for key in ("full", "prior", "searched", "single", "routed")]
    return [name, *losses, f"{figures['gain']:.3f} ± {figures['gain_error']:.3f}"]


def lines(head, rows):
    """A table in Markdown."""
    return "\n".join(
        [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
        + [f"| {' | '.join(cells)} |" for cells in rows]
    )


def by_depth(record, part="groups"):
    """A line for each depth: the means over kinds, and how many sets of blocks are run."""
    rows = [
        [*row(str(table["blocks"]), table), str(table["distinct_plans"])]
        for table in record["results"]["tables"][part]
    ]
    return lines(("blocks", *HEADS, "plans"), rows)


def by_kind(record, blocks):
    """A line for each kind at one depth, and for those that the router never saw."""
    rows = []
    for tables in record["results"]["tables"].values():
        table = next(table for table in tables if table["blocks"] == blocks)
        rows += [row(name, figures) for name, figures in table["by_source"].items()]
    return lines(("kind", *HEADS), rows)


def by_mean(record):
    """A line for each mean that the ledger spends, and how deep prompts run."""
    rows = []
    for case in record["results"]["ledger"]["means"]:
        losses = [f"{case[way]:.3f}" for way in ("single", "alone", "routed", "both")]
        gain = f"{case['gain']:.3f} ± {case['gain_error']:.3f}"
        rows.append([str(case["mean"]), str(case["prompt"]), *losses, gain])
    ways = ("one order", "ledger alone", "router", "router and ledger", "the ledger's gain there")
    return lines(("mean", "prompt's blocks", *ways), rows)


if __name__ == "__main__":
    record = read_record(Path(sys.argv[1]))
    for part in record["results"]["tables"]:
        print(by_depth(record, part), end="\n\n")
    for table in record["results"]["tables"]["groups"]:
        print(by_kind(record, table["blocks"]), end="\n\n")
    if record["results"].get("ledger"):
        print(by_mean(record))
