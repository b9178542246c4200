"""How much faster is a SLEB search that shares prefixes and bounds losses, with the same result?

Every round is searched three ways, one after another, on top of the same blocks gone, so that a
drift of the machine meets all alike: every candidate run whole; blocks before a candidate computed
once for all (shared); and losses bounded too (bounded), as `buddy importance --indicator sleb`
does it. All compute losses by the same code.

    python benchmarks/sleb_speed.py --data-dir DIR --out results/sleb-speed.json
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.hub.presets import DEFAULT_MODEL
from buddy.importance.calibration import cut_windows, read_text
from buddy.importance.indicators.skipping import skip_losses
from buddy.importance.search.bounded import Cheapest, Losses, Pruning
from buddy.lab import experiment

WAYS = ("whole", "shared", "bounded")


def cheapest_whole(backbone, batches, order):
    """A round in which every candidate is run whole: the cheapest, and the loss without it."""

    def loss(*removed):
        wholes = [skip_losses(backbone, ids, (), removed)[0] for ids in batches]
        return sum(float(losses.double().sum()) for losses in wholes)

    candidates = [block for block in range(1, backbone.num_blocks - 1) if block not in order]
    losses = {block: loss(*order, block) for block in candidates}
    best = min(candidates, key=lambda block: (losses[block], block))
    return best, losses[best]


def timed(run):
    """What a call returns, and its seconds."""
    started_s = time.perf_counter()
    found = run()
    return found, time.perf_counter() - started_s


def search_round(backbone, batches, searches, order, first):
    """One round, by every way; `first` is the way that begins, for no one to be always last."""
    candidates = [block for block in range(1, backbone.num_blocks - 1) if block not in order]
    before = searches["bounded"].exact_losses

    def search(way):
        if way == "whole":
            return cheapest_whole(backbone, batches, order)
        unknown = Losses.unknown(backbone.num_blocks, len(batches))
        return searches[way].find(candidates, order, unknown)

    turns = [WAYS[(first + turn) % len(WAYS)] for turn in range(len(WAYS))]
    found = {way: timed(lambda way=way: search(way)) for way in turns}
    (block, loss), _ = found["whole"]
    return {
        "removed": block,
        "loss": loss,
        "same": all(answer == (block, loss) for answer, _ in found.values()),
        "candidate_losses": len(candidates) * len(batches),
        "candidate_losses_computed": searches["bounded"].exact_losses - before,
        **{f"{way}_s": found[way][1] for way in WAYS},
    }


def speedups(rounds, setup_s):
    """How much faster each way is than whole: over all rounds and their setup, and by round."""
    total_s = {way: setup_s[way] + sum(found[f"{way}_s"] for found in rounds) for way in WAYS}
    ratios = {way: [found["whole_s"] / found[f"{way}_s"] for found in rounds] for way in WAYS[1:]}
    return {
        "total_s": total_s,
        "speedup": {way: total_s["whole"] / total_s[way] for way in WAYS[1:]},
        "speedup_by_round": {
            way: {"median": statistics.median(each), "min": min(each), "max": max(each)}
            for way, each in ratios.items()
        },
    }


def main() -> None:
    """Measure, print and write."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--text", default="wikitext2")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="windows at a time")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(DEFAULT_MODEL, policy="full")
    text = read_text(args.text, args.data_dir)
    ids = cut_windows(load_tokenizer(DEFAULT_MODEL), text, tokens=args.tokens, limit=args.windows)
    batches = torch.split(ids, args.batch)
    pruning = Pruning()
    searches = {
        "shared": Cheapest(model.backbone, batches, Pruning(bound_tokens=None)),
        "bounded": Cheapest(model.backbone, batches, pruning),
    }
    searches["shared"].whole_loss()  # warms up
    setup_s = {way: timed(search.whole_loss)[1] for way, search in searches.items()}
    setup_s["whole"] = setup_s["shared"]
    rounds = []
    console = Console(file=sys.stderr)
    for number in track(range(args.rounds), "Searching", console=console):
        order = tuple(found["removed"] for found in rounds)
        rounds.append(search_round(model.backbone, batches, searches, order, number % len(WAYS)))
    targets = len(ids) * (args.tokens - 1)
    results = {
        "removal_order": [found["removed"] for found in rounds],
        "nll": [found.pop("loss") / targets for found in rounds],
        "same_order_and_nll": all(found["same"] for found in rounds),
        **speedups(rounds, setup_s),
        "setup_s": setup_s,
        "rounds": rounds,
    }
    config = {
        **experiment.values(args),
        "model": DEFAULT_MODEL,
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "windows": len(ids),
        "bound_tokens": pruning.bound_tokens,
        "keep_bytes": pruning.keep_bytes,
    }
    del config["data_dir"]
    experiment.save(args.out, "sleb-speed", results, config=config, model=model.facts())
    experiment.show(
        "",
        ("round", "removed", *(f"{way} s" for way in WAYS), "x", "losses computed", "same"),
        [
            (
                number,
                found["removed"],
                *(f"{found[f'{way}_s']:.1f}" for way in WAYS),
                f"{found['whole_s'] / found['bounded_s']:.2f}",
                f"{found['candidate_losses_computed']} of {found['candidate_losses']}",
                found["same"],
            )
            for number, found in enumerate(rounds, start=1)
        ],
    )
    print(", ".join(f"{way} x{speedup:.2f}" for way, speedup in results["speedup"].items()))
    sys.exit(not results["same_order_and_nll"])


if __name__ == "__main__":
    experiment.run(main)
