"""Does a gate's derivative tell what a block is worth? Against what its absence and presence cost.

Each row runs a static plan. The loss has a derivative by the gate of each block: at 1 where it
runs, at 0 where it is skipped (`router.dense_share`). Measured beside it: plans without one block
that ran, with one more, and with two exchanged, near the boundary more often than far from it.

    python benchmarks/gate_derivatives.py smollm2-135m --order ORDER --out FILE
"""

import random

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_examples
from buddy.data.mix import MIX
from buddy.depth.select import select_blocks
from buddy.lab import experiment
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.losses import answer_losses, mean_by_row
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans
from buddy.training.router.measured import draw_swaps, with_swaps
from buddy.training.router.recipe import RouterSettings
from buddy.training.router.straight_through import Choice, straight_through_pass

BATCH = 4


def main():
    """Measure, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("--order", required=True, help="record of buddy importance")
    parser.add_argument("--blocks", type=int, nargs="+", default=[22])
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--near", type=float, default=4.0, help="temperature of a draw, in ranks")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, merge_adapter=True, policy=f"static:{args.order}"
    )
    model.requires_grad_(False)
    rows = read_examples(Source(path=MIX), load_tokenizer(args.model), max_tokens=args.max_tokens)
    rows = random.Random(0).sample(rows, args.rows)
    rows.sort(key=lambda row: row.num_tokens)
    points = [point for blocks in args.blocks for point in measured(model, rows, blocks, args)]
    experiment.save(
        args.out, "gate-derivatives", {"points": points}, config=args, model=model.facts()
    )
    print(table(points))


NUMBERS = ("derivatives", "measured", "correlation", "same_sign")


def table(points):
    """A row for each change of the plan: what it costs on average, and how often the two agree."""
    head = ("blocks", "change", "derivatives", "measured", "correlation", "same sign")
    cells = [[p["blocks"], p["change"], *(f"{p[name]:.3f}" for name in NUMBERS)] for p in points]
    return experiment.markdown(head, cells, texts=2)


def measured(model, rows, blocks, args):
    """What derivatives say of removals, additions and swaps, and what these cost."""
    parts = [
        part(model, rows[at : at + BATCH], at, blocks, args) for at in range(0, len(rows), BATCH)
    ]
    for change in ("removal", "addition", "swap"):
        said, costs = (
            torch.cat([found[change][which].flatten() for found in parts]) for which in (0, 1)
        )
        yield {
            "blocks": blocks,
            "change": change,
            "derivatives": float(said.mean()),
            "measured": float(costs.mean()),
            "correlation": float(torch.corrcoef(torch.stack([said, costs]))[0, 1]),
            "same_sign": float(((said > 0) == (costs > 0)).float().mean()),
        }


def part(model, rows, at, blocks, args):
    """By change, what the derivatives say of it in each row, and what it costs; nats a token."""
    batch, policy, backbone = collate(rows), model.scoring_policy, model.backbone
    depths = torch.full_like(batch.token_ids, blocks)
    made = {}

    def choose(scores, places, budgets):
        made["scores"], made["plan"] = scores, select_blocks(scores, budgets, pinned=policy.pinned)
        made["gates"] = torch.ones(scores.shape, requires_grad=True)
        return Choice(made["plan"], gates=made["gates"])

    with fast_passes(backbone):
        out = straight_through_pass(backbone, policy, batch, depths, choose, is_dense=True)
        hidden = out.hidden[batch.rows, batch.columns]
        losses = answer_losses(backbone, hidden, batch.targets)
        mean_by_row(losses, batch.rows, len(rows)).sum().backward()
    slope, plan = made["gates"].grad, made["plan"]
    settings = RouterSettings(method="measured", samples=args.swaps + 1, temperature=args.near)
    ranks = made["scores"].argsort(1).argsort(1).float()
    leaves, enters = draw_swaps(
        ranks, plan, policy, settings, places=range(at, at + len(rows)), seed=0
    )
    swapped = with_swaps(plan, (leaves, enters))
    without = swapped[:, 1:].scatter(2, enters[..., None], False)
    more = swapped[:, 1:].scatter(2, leaves[..., None], True)
    masks = torch.cat([swapped, without, more], 1)
    with torch.no_grad(), fast_passes(backbone):
        lost = leaf_losses(backbone, run_plans(backbone, 1, batch, lambda seen: masks), batch)
    swap, removal, addition = (lost[:, 1:] - lost[:, :1]).split(args.swaps, 1)
    gone, come = -slope.gather(1, leaves), slope.gather(1, enters)
    return {"removal": (gone, removal), "addition": (come, addition), "swap": (gone + come, swap)}


if __name__ == "__main__":
    experiment.run(main)
