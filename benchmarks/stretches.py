"""Would other blocks serve another part of an answer? An oracle of sets by stretches of an answer.

Every answer is measured under the set of each order of a `buddy route` run, at one depth, from its
first token to its last. Ways to choose among them, all against the order that its group has:

- `answer`: the best for the answer, chosen on every other token and measured on those between;
- `stretch`: the same within each stretch of tokens, so that sets may change along the answer;
- `so far`: the best on the tokens before a stretch, measured on the stretch: what a router that
  sees how the answer goes on could know.

A set that changes would find other keys and values than one that ran from the beginning, which no
column pays for: `stretch` is a bound from above.

    python benchmarks/stretches.py runs/route/record.json --rows validation.jsonl --out FILE
"""

from pathlib import Path

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.lab import experiment
from buddy.records import read_record
from buddy.training.batches import by_length, collate
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import leaf_tokens
from buddy.training.predictor.shared_prefix import run_plans

WAYS = ("answer", "stretch", "so far")


@torch.no_grad()
def token_losses(backbone, examples, sets):
    """Nats of each answer's tokens under each set: [sets, tokens], by answer."""
    batch = collate(examples, backbone.device)
    every = sets[None].expand(len(examples), -1, -1)
    out = run_plans(backbone, 1, batch, lambda seen: every)
    leaf, losses = leaf_tokens(backbone, out, batch)
    by_leaf = losses.double().split(leaf.bincount().tolist())
    return [torch.stack([by_leaf[leaf] for leaf in mine]) for mine in out.leaf.tolist()]


def chosen_on_half(losses):
    """Nats of all tokens, each under the set that the tokens beside it choose."""
    total = 0.0
    for first in (0, 1):
        best = losses[:, first::2].sum(1).argmin()
        total += float(losses[best, 1 - first :: 2].sum())
    return total


def ways(losses, own, size):
    """Nats of one answer: by its group's order, and by each way to choose."""
    stretches = losses.split(size, 1)
    so_far, before = 0.0, torch.zeros(len(losses), dtype=torch.float64)
    for stretch in stretches:
        best = int(before.argmin()) if bool(before.any()) else own
        so_far += float(stretch[best].sum())
        before += stretch.sum(1)
    found = (chosen_on_half(losses), sum(map(chosen_on_half, stretches)), so_far)
    return float(losses[own].sum()), *found


def main():
    """Measure, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--rows", action="append", required=True)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--stretch", type=int, default=16)
    parser.add_argument("--each", type=int, default=60, help="rows of each source, at most")
    args = parser.parse_args()
    record = read_record(args.record)
    name, dtype = (record["config"]["model"][key] for key in ("name", "dtype"))
    model = BuddyForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), policy="full")
    orders, confirmed = record["results"]["orders"], record["results"]["confirmed"]
    sets = torch.ones(len(orders), model.num_blocks, dtype=torch.bool)
    for row, order in enumerate(orders.values()):
        sets[row, order[: model.num_blocks - args.blocks]] = False
    points, gains, tokens = [], [], []
    by_source = experiment.by_source(args.rows, load_tokenizer(name), 256)
    for source, rows in sorted(by_source.items()):
        long = [row for row in rows if len(row.answer) >= 2 * args.stretch][: args.each]
        if source not in confirmed or not long:
            continue
        best = confirmed[source]
        own = list(orders).index(best["order"] if best["is_kept"] else record["results"]["common"])
        found = []
        with fast_passes(model.backbone):
            for _, part in by_length(long, 8):
                found += [
                    (*ways(losses, own, args.stretch), losses.shape[1])
                    for losses in token_losses(model.backbone, part, sets)
                ]
        nats = torch.tensor(found, dtype=torch.float64)
        apart, count = nats[:, :1] - nats[:, 1:-1], nats[:, -1:]
        gain = apart.sum(0) / count.sum()
        error = (apart - gain * count).square().sum(0).sqrt() / count.sum()
        gains.append(gain), tokens.append(error)
        points.append({"source": source, "answers": len(long), "tokens": int(count.sum())})
        for way, value, spread in zip(WAYS, gain.tolist(), error.tolist(), strict=True):
            points[-1] |= {way: value, f"{way}_error": spread}
        print(points[-1])
    mean, error = torch.stack(gains).mean(0), torch.stack(tokens).square().sum(0).sqrt()
    overall = {}
    for way, value, spread in zip(WAYS, mean.tolist(), error.tolist(), strict=True):
        overall |= {way: value, f"{way}_error": spread / len(gains)}
        print(f"{way:8s} {value:+.4f} ± {spread / len(gains):.4f}")
    results = {"points": points, "mean": overall}
    experiment.save(args.out, "stretches", results, config=args, model=model.facts())


if __name__ == "__main__":
    experiment.run(main)
