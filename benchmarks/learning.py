"""What makes a router learn, and what of it is a better order? A factorial, with controls.

Each arm differs from one that keeps the prior's order in how the router learns: its rate, gates of
skipped blocks, sampled plans, measured swaps. All see the same rows, budgets and steps, by two
seeds. What is compared is the loss of unseen rows, row by row.

Two controls tell an order from a route. `own order` runs a learned router's weights under its mean
order over training prompts. `frozen` trains again with that order as the prior and a router that
does not learn. What `frozen` gains over the prior's order is the order's; what the learned router
gains over `frozen` comes of the input.

Several processes may share a folder of runs if `--only` gives them different arms; the same command
without it collects. A run that was interrupted goes on.

    python benchmarks/route_rows.py --data-dir data --out runs/kinds --rows 600
    python benchmarks/learning.py recipes/learning.toml --out results/training/learning.json
"""

import statistics
from functools import partial
from pathlib import Path

import torch
from ablations import trained

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import by_source, read_all
from buddy.lab import experiment
from buddy.lab.evaluation.answers.answer_points import by_answer
from buddy.lab.steps import refuse_others
from buddy.records import read_record
from buddy.resume import differing
from buddy.settings import read_recipe
from buddy.training.answer_losses import Losses
from buddy.training.batches import by_length, collate, draw_rows, rows_identity
from buddy.training.router.evaluate import answer_pass
from buddy.training.router.recipe import Recipe
from buddy.training.summaries import draw_summaries, router_summaries

PRIOR = "static"
STILL = ["optim.router_learning_rate=0.0"]
LEARNS = ["router.standardise=true", "optim.router_learning_rate=1e-3"]
ARMS = {
    PRIOR: STILL,
    "folded before, 1e-3": ["optim.router_learning_rate=1e-3"],
    "gates, 1e-4": [*LEARNS, "optim.router_learning_rate=1e-4"],
    "gates, 1e-3": LEARNS,
    "dense gates": [*LEARNS, "router.dense_share=1.0"],
    "gates of skipped": [*LEARNS, "router.dense_share=1.0", "router.relaxation=skipped-softmax"],
    "policy gradient": [*LEARNS, "router.method=policy-gradient", "router.samples=4"],
    "measured": [*LEARNS, "router.method=measured", "router.samples=4"],
}
DEPTHS = (26, 22, 18)


def main():
    """Train and measure what is not there yet; print and record the table."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/learning"))
    parser.add_argument("--only", action="append", choices=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--rows", type=int, default=25, help="unseen rows of each kind")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    found = {}
    # The first seed of every arm comes first: it shows early what the second is spent on.
    for seed in args.seeds:
        for arm in args.only or ARMS:
            for way, measured in measured_arm(args, arm, seed).items():
                found.setdefault((arm, way), []).append(measured)
    points = [point for key in found for point in compared(found, *key, args.depths)]
    config = {**experiment.texts(args), "recipe": args.recipe.read_text(), "arms": ARMS}
    experiment.save(args.out, "learning", {"points": points}, config=config)
    print(table(points, "prior"))
    print(table([point for point in points if point["way"] == "trained"], "frozen"))


def measured_arm(args, arm, seed):
    """The losses of an arm's ways by one seed: as it was trained, and its controls."""
    sets = [*args.set, f"optim.seed={seed}"]
    folder = args.runs / f"{arm.replace(' ', '-').replace(',', '')}-{seed}"
    record = trained(args.recipe, folder, [*sets, *ARMS[arm]])
    ways = {"trained": losses(args, folder, sets, record)}
    if ARMS[arm] != STILL:
        order = folder / "order.json"
        if not order.exists():
            save_order(folder / "checkpoint", read_recipe(Recipe, args.recipe, sets), order)
        ways["own order"] = losses(args, folder, sets, record, order)
        frozen = folder.with_name(f"{folder.name}-frozen")
        held = trained(args.recipe, frozen, [*sets, *STILL, f"router.prior={order}"])
        ways["frozen"] = losses(args, frozen, sets, held)
    return ways


def save_order(checkpoint, recipe, path):
    """Write the order of a learned router: by its mean scores over training prompts."""
    model = BuddyForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    rows = read_all(
        recipe.data.train, load_tokenizer(recipe.model.name), max_tokens=recipe.data.max_tokens
    )
    with torch.no_grad():
        summaries = draw_summaries(partial(router_summaries, model, model.router), rows, 0)
        scores = model.router.decision.fuse(model.router.decision(summaries)).mean(0)
    order = [int(block) + 1 for block in scores.argsort(stable=True)]
    results = {"removal_order": order}
    config = {"checkpoint": str(checkpoint)}
    experiment.save(path, "importance-learned", results, config=config, model=model.facts())


def losses(args, folder, sets, record, order=None):
    """What unseen rows lose at each depth under a run's weights, measured once."""
    recipe = read_recipe(Recipe, args.recipe, sets)
    tokenizer = load_tokenizer(recipe.model.name)
    everything = read_all(recipe.data.validation, tokenizer, max_tokens=recipe.data.max_tokens)
    kinds = by_source(everything)
    rows = [row for kind in kinds.values() for row in draw_rows(kind, args.rows, 0)]
    config = {
        "model": record["model"],
        "depths": args.depths,
        "rows": rows_identity(rows),
        "order": None if order is None else read_record(order)["results"]["removal_order"],
    }
    path = folder / ("losses.json" if order is None else "own-order.json")
    if path.exists():
        saved = read_record(path)
        refuse_others(path, "another measurement, with other", differing(saved["config"], config))
        results = saved["results"]
    else:
        results = measure(folder / "checkpoint", rows, args.depths, config["order"])
        experiment.save(path, "learning-losses", results, config=config, model=record["model"])
    return {**results, "step_ms": 1000 * record["results"]["seconds"] / record["results"]["steps"]}


def measure(checkpoint, rows, depths, order):
    """Nats and plans of each row at each depth, and its tokens."""
    policy = None if order is None else f"static:{','.join(map(str, order))}"
    model = BuddyForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, merge_adapter=True, policy=policy
    )
    nats = torch.zeros(len(rows), len(depths), dtype=torch.float64)
    plans = [[""] * len(depths) for _ in rows]
    for places, part in by_length(rows, 8):
        batch = collate(part, model.device)
        for column, blocks in enumerate(depths):
            out, lost = answer_pass(model, batch, torch.full_like(batch.token_ids, blocks))
            nats[places, column] = torch.zeros(len(part), dtype=torch.float64).index_add(
                0, batch.rows, lost.double()
            )
            for place, plan in zip(places, out.plan.executed_sets, strict=True):
                plans[place][column] = " ".join(map(str, plan))
    return {
        "nats": nats.tolist(),
        "tokens": [len(row.answer) for row in rows],
        "sources": [row.source for row in rows],
        "plans": plans,
    }


def compared(found, arm, way, depths):
    """A way's loss at each depth, and what it gains: over the prior's order, and over the others.

    Rows are paired, and a row's loss is its mean over seeds; gains by single seeds stand beside.
    """
    runs = found[arm, way]
    for column, blocks in enumerate(depths):
        point = {
            "arm": arm,
            "way": way,
            "blocks": blocks,
            "nats": float(mean_losses(runs, column).mean),
            "distinct_plans": [len({row[column] for row in run["plans"]}) for run in runs],
            "step_ms": statistics.mean(run["step_ms"] for run in runs),
        }
        others = {
            "prior": (PRIOR, "trained"),
            "order": (arm, "own order"),
            "frozen": (arm, "frozen"),
        }
        for name, key in others.items():
            if key in found and key != (arm, way):
                point[f"gain_over_{name}"] = gain(runs, found[key], column)
        yield point


def mean_losses(runs, column):
    """Losses of rows at one depth, mean over seeds."""
    nats = torch.tensor([[row[column] for row in run["nats"]] for run in runs]).double().mean(0)
    return Losses(nats[:, None], torch.tensor(runs[0]["tokens"]).double())


def gain(runs, others, column):
    """Nats a token that runs gain over others, its paired error, and the gain by each seed.

    Beside it the mean over answers, of which each counts the same.
    """

    def behind(ours, theirs):
        mine = mean_losses(ours, column)
        nats, error = mean_losses(theirs, column).behind(mine.nats[:, 0])
        return float(nats), float(error)

    pairs = list(zip(runs, others, strict=False))
    by_seed = [behind([one], [other])[0] for one, other in pairs]
    sides = [list(side) for side in zip(*pairs, strict=True)]
    nats, error = behind(*sides)
    mine, other = (mean_losses(side, column) for side in sides)
    apart = (other.nats - mine.nats)[:, 0].tolist()
    answers = by_answer(list(zip(apart, runs[0]["tokens"], strict=True)))
    return {
        "nats": nats,
        "error": error,
        "by_seed": by_seed,
        "by_answer": dict(zip(("nats", "error"), answers, strict=True)),
    }


def table(points, over):
    """Loss, and gain over one of the others with its error: one row a way, one column a depth."""
    depths = sorted({point["blocks"] for point in points}, reverse=True)
    cells = {}
    for point in points:
        text = f"{point['nats']:.3f}"
        if f"gain_over_{over}" in point:
            text += " {nats:+.3f} ± {error:.3f}".format(**point[f"gain_over_{over}"])
        cells.setdefault((point["arm"], point["way"]), {})[point["blocks"]] = text
    head = ("arm", "way", *(f"{depth} blocks" for depth in depths))
    rows = [(*names, *(row[depth] for depth in depths)) for names, row in cells.items()]
    return experiment.markdown(head, rows, texts=2)


if __name__ == "__main__":
    experiment.run(main)
