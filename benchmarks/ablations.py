"""Which settings of the router matter? The paper's ablations, each a short run of one recipe.

Context K, V or K+V; prior none, delta-PPL, cosine or Taylor; omega 0.01 to 1; context layer 1 to 4.
Every run differs from the recipe in one setting, those of omega also in how the router starts and
learns; the recipe's own is run once. What is compared is the evaluation at its end: the answer
cross-entropy on validation rows at each budget, and the number of distinct plans. Two processes may
share a folder of runs if `--only` gives them different ablations; the same command without it
collects.

    python benchmarks/ablations.py recipes/ablations.toml --out results/training/ablations.json
"""

import argparse
import subprocess
import sys
from pathlib import Path

from reuse import is_trained

from buddy.records import RunRecord, read_record
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe

PRIORS = {
    "none": "none",
    "delta-PPL": "results/importance/ppl.json",
    "cosine": "results/importance/cosine.json",
    "Taylor": "results/importance/taylor.json",
    "SLEB": "results/importance/sleb.json",
    "ShortGPT, then SLEB": "results/importance/shortgpt-sleb.json",
}
LEARNING = ["router.orders=[]", "optim.router_learning_rate=1e-3"]
"""A start from measured orders is scaled with omega. So the runs of omega start from the prior
alone, whose ranking no omega changes, and learn fast enough to leave it."""
ABLATIONS = {
    "context": {
        source: [f"router.planner.context={source}"] for source in ("key", "value", "key+value")
    },
    "prior": {name: [f"router.prior={prior}"] for name, prior in PRIORS.items()},
    "omega": {str(omega): [*LEARNING, f"router.omega={omega}"] for omega in (0.01, 0.1, 0.5, 1.0)},
    "context layer": {
        str(layer): [f"router.planner.context_layer={layer}"] for layer in (1, 2, 3, 4)
    },
}


def main():
    """Train what is not trained yet; print and record the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=list(ABLATIONS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    points, base = [], read_recipe(Recipe, args.recipe, args.set)
    for ablation in args.only or ABLATIONS:
        for name, changes in ABLATIONS[ablation].items():
            sets = [*args.set, *changes]
            same = read_recipe(Recipe, args.recipe, sets) == base
            folder = args.runs / ("recipe" if same else f"{ablation} {name}".replace(" ", "-"))
            points += [
                {"ablation": ablation, "setting": name, **one}
                for one in trained(args.recipe, folder, sets)["results"]["evaluation"]
            ]
    config = {"recipe": args.recipe.read_text(), "set": args.set}
    RunRecord(kind="ablations", config=config, model=None, results={"points": points}).save(
        args.out
    )
    print(table(points))


def trained(recipe, folder, sets):
    """The record of one run, which is made if it is not there."""
    if not is_trained(folder, read_recipe(Recipe, recipe, sets)):
        changes = [part for one in sets for part in ("--set", one)]
        command = ["train", recipe, "--out", folder, "--resume", *changes]
        subprocess.run([sys.executable, "-m", "buddy", *map(str, command)], check=True)
    return read_record(folder / "record.json")


def table(points):
    """Cross-entropy, and distinct plans in brackets: one row a setting, one column a budget."""
    depths = sorted({point["blocks"] for point in points}, reverse=True)
    lines = ["| | | " + " | ".join(f"{depth} blocks" for depth in depths) + " |"]
    lines.append("|---|---|" + "---:|" * len(depths))
    for key in dict.fromkeys((point["ablation"], point["setting"]) for point in points):
        row = {
            point["blocks"]: f"{point['cross_entropy']:.3f} ({point['distinct_plans']})"
            for point in points
            if (point["ablation"], point["setting"]) == key
        }
        lines.append(f"| {key[0]} | {key[1]} | " + " | ".join(row[d] for d in depths) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
