r"""What does the paper's recipe gain by its router? The run at its full length beside a control.

The control is a run on the same data with a router that does not learn, so the prior's order runs.
It may be of several runs, each of which starts from the adapters of the one before. `own order`
runs the weights that were learned under their router's mean order over training prompts: what is
gained over it comes of the input. What is compared is the loss of unseen rows, row by row, with
distinct plans beside. Folders are those of finished runs, TRAIN and VALIDATION lists as in their
recipe.

    python benchmarks/paper_run.py recipes/paper.toml \
        --control runs/control --learned runs/learned \
        --set data.train=TRAIN --set data.validation=VALIDATION \
        --out results/training/paper-run.json
"""

from dataclasses import asdict
from pathlib import Path

from learning import PRIOR, compared, losses, save_order, table

from buddy.errors import ResultError
from buddy.lab import experiment
from buddy.records import read_record
from buddy.resume import differing
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
    for name, folder in folders.items():
        check_run(folder / "record.json", records[name], args, still=name == "control")
    order = args.learned / "order.json"
    if not order.exists():
        save_order(args.learned / "checkpoint", read_recipe(Recipe, args.recipe, args.set), order)
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


def check_run(path, record, args, *, still):
    """Refuse a run on other data or from another prior, and a control whose router learned."""
    recipe, config = asdict(read_recipe(Recipe, args.recipe, args.set)), record["config"]
    wanted = {key: recipe[key] for key in ("model", "data")}
    changed = differing({key: config[key] for key in wanted}, wanted)
    rate = config["optim"]["router_learning_rate"]
    if (rate == 0) != still:
        changed.append(f"router_learning_rate (is {rate})")
    if changed:
        raise ResultError(
            f"{path} is of another run, with other {', '.join(changed)}: name the "
            "data of both by --set, and the control's folder by --control"
        )


if __name__ == "__main__":
    experiment.run(main)
