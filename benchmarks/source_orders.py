"""Which blocks does one kind of input need least? A greedy removal order on its answers alone.

Each round skips every remaining block in turn, on top of those already gone, and removes the one
without which the answers' mean cross-entropy is lowest; the first and the last block stay. After
`--rounds` removals the rest follow in the order of the last round. With `--begin` the first N
removals are those of a record, and the search goes on from there: what an untuned model says of the
last removals is noise, so they are searched again on tuned weights. Several `--begin` follow one
another, each block once, and `--rounds 0` searches nothing. The record serves as
`router.orders` of a recipe, or as `--policy static:FILE.json`.

    python benchmarks/source_orders.py smollm2-135m runs/mix.jsonl --sources arc_easy piqa \
        --rows 28 --out results/importance/answers-choice.json
"""

import argparse
import random
from pathlib import Path

import torch

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.lab import experiment
from buddy.methods.pudding.greedy import greedy_order
from buddy.policies.measured import read_order
from buddy.training.batches import collate
from buddy.training.fast import fast_passes
from buddy.training.predictor.depth_losses import leaf_losses
from buddy.training.predictor.shared_prefix import run_plans

BATCH = 14


def main():
    """Search, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("model")
    parser.add_argument("file", help="instruction rows")
    parser.add_argument("--sources", nargs="*", help="of the rows that count; all if not given")
    parser.add_argument("--rows", type=int, default=28, help="as many of each source as it allows")
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument(
        "--begin",
        type=begin_of,
        action="append",
        default=[],
        metavar="RECORD:N",
        help="the first N removals of a record; may be repeated",
    )
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    examples = drawn(args)
    begun = (read_order(path, model.resources)[0][:count] for path, count in args.begin)
    begin = list(dict.fromkeys(block for removals in begun for block in removals))
    found = greedy_order(
        model.num_blocks,
        args.rounds,
        lambda masks: losses_of(model.backbone, examples, masks).mean(0),
        begin=begin,
        on_round=lambda so_far: print(f"{so_far.num_removed} gone: {so_far.costs[-1]:.4f} nats"),
    )
    config = experiment.values(args)
    config |= {"rows": len(examples), "begin": begin, "dtype": str(model.dtype)}
    del config["file"]
    results = {"removal_order": list(found.order), "nll": list(found.costs)}
    kind = "importance-sleb-answers"
    experiment.save(args.out, kind, results, config=config, model=model.facts())


def begin_of(text):
    """RECORD:N in its parts."""
    path, _, count = text.rpartition(":")
    if not (path and count.isdigit()):
        raise argparse.ArgumentTypeError(f"expected RECORD:N, as in order.json:12, got {text!r}")
    return Path(path), int(count)


def drawn(args):
    """Rows of each source, as many of one as of another."""
    tokenizer = load_tokenizer(args.model)
    by_source = experiment.by_source([args.file], tokenizer, args.max_tokens)
    names = args.sources or sorted(by_source)
    draw = random.Random(0)
    each = max(1, args.rows // len(names))
    rows = [example for name in names for example in draw.sample(by_source[name], each)]
    return sorted(rows, key=lambda example: example.num_tokens)


def losses_of(backbone, examples, masks):
    """[rows, plans], plans that begin alike sharing their beginning."""
    found = []
    with torch.no_grad(), fast_passes(backbone):
        for start in range(0, len(examples), BATCH):
            batch = collate(examples[start : start + BATCH])
            every = masks[None].expand(len(batch.token_ids), -1, -1)
            out = run_plans(backbone, 1, batch, lambda seen, every=every: every)
            found.append(leaf_losses(backbone, out, batch))
    return torch.cat(found)


if __name__ == "__main__":
    experiment.run(main)
