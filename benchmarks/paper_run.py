r"""What does the paper's recipe gain by its router? The run at its full length beside a control.

The control is the same run with a router that does not learn, so the prior's order runs. `own
order` runs the weights that were learned under their router's mean order over training prompts:
what is gained over it comes of the input. What is compared is the loss of unseen rows, row by row,
with distinct plans beside. Folders are those of finished runs, ROWS a list as in their recipe.

    python benchmarks/paper_run.py recipes/paper.toml \
        --control runs/control --learned runs/learned \
        --set data.train=ROWS --set data.validation=ROWS --out results/training/paper-run.json
"""

from pathlib import Path

from learning import PRIOR, compared, losses, save_order, table

from buddy.lab import experiment
from buddy.records import read_record
from buddy.settings import read_recipe
from buddy.training.router.recipe import Recipe

LEARNED = "learned"


def main():
    """Measure what is not there yet; print and record the tables."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--learned", type=Path, required=True)
    parser.add_argument("--depths", type=int, nargs="+", default=[30, 26, 22, 19, 15])
    parser.add_argument("--rows", type=int, default=200, help="unseen rows of each source")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    folders = {"control": args.control, LEARNED: args.learned}
    records = {name: read_record(folder / "record.json") for name, folder in folders.items()}
    order = args.learned / "order.json"
    if not order.exists():
        recipe = read_recipe(Recipe, args.recipe, args.set)
        save_order(args.learned / "checkpoint", recipe, order)
    ways = {
        (PRIOR, "trained"): ("control", None),
        (LEARNED, "trained"): (LEARNED, None),
        (LEARNED, "own order"): (LEARNED, order),
    }
    found = {
        key: [losses(args, folders[name], args.set, records[name], path)]
        for key, (name, path) in ways.items()
    }
    points = [point for key in found for point in compared(found, *key, args.depths)]
    config = {
        **experiment.texts(args),
        "recipe": args.recipe.read_text(),
        "runs": {name: record["config"] for name, record in records.items()},
        "order": read_record(order)["results"]["removal_order"],
    }
    experiment.save(args.out, "paper-run", {"points": points}, config=config)
    print(table(points, "prior"))
    print(table([point for point in points if point["way"] == "trained"], "order"))


if __name__ == "__main__":
    experiment.run(main)
