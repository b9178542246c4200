r"""Do kinds' plans still gain once adapters are tuned under them?

Each arm trains adapters on a checkpoint of `buddy route`, on the same rows for the same steps:
`routed` under the plans of its router, which stays as it was fitted, and `one order` under its
common order, which all prompts share. What is compared is the loss of unseen rows, row by row, by
pairs of seeds, over all rows and by their source.

A run that is there is used, and one that was interrupted goes on.

    python benchmarks/route_rows.py --data-dir data --out runs/kinds --rows 600
    buddy route smollm2-135m --rows runs/kinds/train.jsonl \
        --check runs/kinds/validation.jsonl --out runs/routed
    python benchmarks/tuned_routes.py recipes/tuned-routes.toml \
        --out results/training/tuned-routes.json
"""

from pathlib import Path

from ablations import trained
from learning import gain, losses, mean_losses

from buddy.lab import experiment

ORDER = "one order"
ARMS = {
    ORDER: ["router.policy=static", "lora.keep_context=true"],
    "routed": ["lora.keep_context=true", "optim.router_learning_rate=0.0"],
}
ALL = "all"


def main():
    """Train and measure what is not there yet; print and record the table."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/tuned-routes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--depths", type=int, nargs="+", default=[26, 22, 18, 15])
    parser.add_argument("--rows", type=int, default=50, help="unseen rows of each kind")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    found = {arm: [] for arm in ARMS}
    for seed in args.seeds:
        for arm, changes in ARMS.items():
            sets = [*args.set, *changes, f"optim.seed={seed}"]
            folder = args.runs / f"{arm.replace(' ', '-')}-{seed}"
            found[arm].append(losses(args, folder, sets, trained(args.recipe, folder, sets)))
    points = list(compared(found, args.depths))
    config = {**experiment.texts(args), "recipe": args.recipe.read_text(), "arms": ARMS}
    experiment.save(args.out, "tuned-routes", {"points": points}, config=config)
    print(table(points))


def compared(found, depths):
    """Losses of both arms, and what routing gains, over all rows and by kind at each depth."""
    sources = found[ORDER][0]["sources"]
    for kind in (ALL, *dict.fromkeys(sources)):
        rows = [row for row, source in enumerate(sources) if kind in (ALL, source)]
        runs = {arm: [of_rows(run, rows) for run in each] for arm, each in found.items()}
        for column, blocks in enumerate(depths):
            yield {
                "kind": kind,
                "blocks": blocks,
                "nats": {arm: float(mean_losses(each, column).mean) for arm, each in runs.items()},
                "distinct_plans": [
                    len({row[column] for row in run["plans"]}) for run in runs["routed"]
                ],
                "gain": gain(runs["routed"], runs[ORDER], column),
            }


def of_rows(run, rows):
    """What was measured on some rows."""
    return {name: [run[name][row] for row in rows] for name in ("nats", "tokens", "plans")}


def table(points):
    """What routing gains over one order: a row a kind, a column a depth."""
    depths = sorted({point["blocks"] for point in points}, reverse=True)
    cells = {}
    for point in points:
        found, seeds = point["gain"], " / ".join(f"{n:+.3f}" for n in point["gain"]["by_seed"])
        text = f"{found['nats']:+.3f} ± {found['error']:.3f} ({seeds})"
        cells.setdefault(point["kind"], {})[point["blocks"]] = text
    head = ("routed gains", *(f"{depth} blocks" for depth in depths))
    return experiment.markdown(head, [(k, *(row[d] for d in depths)) for k, row in cells.items()])


if __name__ == "__main__":
    experiment.run(main)
