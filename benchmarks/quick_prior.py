"""How near does the quick prior come to orders that were measured for longer?

The quick prior is the cosine of summaries over four windows of the text that ships with Buddy. It
is compared with records of `buddy importance` for the same model: rank correlations over the middle
blocks, and how many of the blocks that each removes first are the same.

    python benchmarks/quick_prior.py --model smollm2-135m --out results/quick-prior.json \
        results/importance/shortgpt.json results/importance/cosine.json results/importance/sleb.json
"""

import time
from pathlib import Path

import torch
from scipy.stats import kendalltau, spearmanr

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.checkpoint.quick_prior import WINDOW, quick_windows
from buddy.engine.influence import summary_cosine
from buddy.lab import experiment
from buddy.policies.measured import read_order

REMOVED = (4, 8, 12, 15)


def main():
    """Measure, compare and record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("orders", type=Path, nargs="+")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(args.model, policy="full")
    windows = quick_windows(load_tokenizer(args.model), WINDOW)
    started_s = time.perf_counter()
    importance = sum(summary_cosine(model.backbone, window[None]) for window in windows)
    seconds = time.perf_counter() - started_s
    middle = importance[1:-1]
    ascending = torch.argsort(middle, descending=True, stable=True).flip(0)
    quick = [block + 1 for block in ascending.tolist()]
    compared = []
    for path in args.orders:
        order = [b for b in read_order(path, model.resources)[0] if b in set(quick)]
        both = [b for b in quick if b in set(order)]  # a record may leave blocks out
        places = ([order.index(b) for b in both], [quick.index(b) for b in both])
        same = {str(n): len(set(quick[:n]) & set(order[:n])) for n in REMOVED if n <= len(order)}
        compared.append(
            {
                "order": path.name,
                "kendall": float(kendalltau(*places).statistic),
                "spearman": float(spearmanr(*places).statistic),
                "same": same,
            }
        )
        print(path.name, compared[-1])
    results = {
        "removal_order": quick,
        "importance": importance.tolist(),
        "tokens": sum(map(len, windows)),
        "seconds": seconds,
        "compared": compared,
    }
    config = {"model": args.model, "dtype": str(model.dtype), "window": WINDOW}
    experiment.save(args.out, "quick-prior", results, config=config, model=model.facts())


if __name__ == "__main__":
    experiment.run(main)
