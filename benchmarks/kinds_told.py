"""Does the router still tell kinds of input apart? Plans of unseen prompts against their orders.

A recipe with `router.orders` names an order for each kind of input. For each prompt this asks
whether a checkpoint runs exactly the blocks that its kind's order keeps; sources that the recipe
does not name have the prior's order.

    python benchmarks/kinds_told.py recipes/smollm2-135m.toml runs/smollm2-135m/checkpoint \
        --rows runs/mix-validation.jsonl --out results/training/kinds-told.json
"""

from pathlib import Path

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.lab import experiment
from buddy.settings import read_recipe
from buddy.training.predictor.reward_model import RewardModel
from buddy.training.router.model import read_prior
from buddy.training.router.recipe import Recipe

BATCH = 32


def main():
    """Ask, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--rows", action="append", required=True, help="unseen rows; repeatable")
    parser.add_argument("--depths", default="26,22,18,15")
    args = parser.parse_args()
    recipe = read_recipe(Recipe, args.recipe)
    tokenizer = load_tokenizer(recipe.model.name)
    model = BuddyForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16)
    by_source = experiment.by_source(args.rows, tokenizer, recipe.data.max_tokens)
    depths = [int(depth) for depth in args.depths.split(",")]
    points = [
        {"source": source, "rows": len(rows), "blocks": depth, "share": share}
        for source, rows in sorted(by_source.items())
        for depth, share in shares(model, recipe, source, rows, depths).items()
    ]
    experiment.save(args.out, "kinds-told", {"points": points}, config=args, model=model.facts())
    for depth in depths:
        here = [point for point in points if point["blocks"] == depth]
        share = sum(point["share"] * point["rows"] for point in here)
        print(f"{depth} blocks: {share / sum(point['rows'] for point in here):.3f}")


@torch.no_grad()
def shares(model, recipe, source, rows, depths):
    """How many rows of one source run their order's blocks, by depth."""
    records = [order.record for order in recipe.router.orders if source in order.sources]
    decision, prompts = model.router.decision, RewardModel(model)
    order = read_prior(Path(records[0]), model.resources) if records else decision.prior
    scores = torch.cat(
        [
            decision.fuse(decision(prompts.summaries(rows[start : start + BATCH])))
            for start in range(0, len(rows), BATCH)
        ]
    )
    found = {}
    for depth in depths:
        wanted = order.topk(depth - 2).indices.sort().values
        run = scores.topk(depth - 2).indices.sort().values
        found[depth] = float((run == wanted).all(1).float().mean())
    return found


if __name__ == "__main__":
    experiment.run(main)
