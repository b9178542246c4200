"""Which settings of the router matter? The paper's ablations, each a short run of one recipe.

Context K, V or K+V; prior none, delta-PPL, cosine or Taylor; omega 0.01 to 1; context layer 1 to 4.
Every run differs from the recipe in one setting, those of omega also in how the router starts and
learns; the recipe's own is run once. What is compared is the evaluation at its end: the answer
cross-entropy on validation rows at each budget, and the number of distinct plans. Two processes may
share a folder of runs if `--only` gives them different ablations; the same command without it
collects.

    python benchmarks/ablations.py recipes/ablations.toml --out results/training/ablations.json
"""

from pathlib import Path

from buddy.lab import experiment
from buddy.lab.steps import run_buddy, trained_record
from buddy.records import read_record
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
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"))
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
                {"ablation": ablation, "setting": name, **point}
                for point in trained(args.recipe, folder, sets)["results"]["evaluation"]
            ]
    config = {"recipe": args.recipe.read_text(), "set": args.set}
    experiment.save(args.out, "ablations", {"points": points}, config=config)
    print(table(points))


def trained(recipe, folder, sets):
    """The record of one run, which is made if it is not there."""
    record = trained_record(folder, read_recipe(Recipe, recipe, sets))
    if record is None:
        changes = [part for change in sets for part in ("--set", change)]
        run_buddy(["train", recipe, "--out", folder, "--resume", *changes])
        record = read_record(folder / "record.json")
    return record


def table(points):
    """Cross-entropy, and distinct plans in brackets: one row a setting, one column a budget."""
    depths = sorted({point["blocks"] for point in points}, reverse=True)
    cells = {}
    for point in points:
        row = cells.setdefault((point["ablation"], point["setting"]), {})
        row[point["blocks"]] = f"{point['cross_entropy']:.3f} ({point['distinct_plans']})"
    head = ("", "", *(f"{depth} blocks" for depth in depths))
    rows = [(*names, *(row[depth] for depth in depths)) for names, row in cells.items()]
    return experiment.markdown(head, rows, texts=2)


if __name__ == "__main__":
    experiment.run(main)
