"""How long does a warm `buddy generate` of one token take, beside what it cannot do without?

Both are whole processes, which take turns: `buddy generate` on the default model, to its end; and a
Python that imports torch and transformers' model class and does nothing else.

    python benchmarks/startup.py --out results/startup.json
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.progress import track

from buddy.records import RunRecord

COMMANDS = {
    "import": [sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM"],
    "generate": [sys.executable, "-m", "buddy", "generate", "Hello", "--max-new-tokens", "1"],
}


def main():
    """Measure, show, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw, seen = random.Random(0), {name: [] for name in COMMANDS}
    for number in track(range(args.rounds + 1), transient=True):
        for name in draw.sample(list(COMMANDS), len(COMMANDS)):
            begun = time.perf_counter()
            subprocess.run(COMMANDS[name], check=True, capture_output=True)
            if number:  # the first round fills caches of files
                seen[name].append(time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(seen["generate"], seen["import"], strict=True)]
    results = {
        **{f"{name}_s": statistics.median(times) for name, times in seen.items()},
        "ratio": statistics.median(ratios),
        "ratio_by_round": ratios,
    }
    print(
        f"generate {results['generate_s']:.2f} s, import {results['import_s']:.2f} s, "
        f"ratio {results['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    config = {"rounds": args.rounds, "new_tokens": 1}
    RunRecord(kind="startup", model=None, config=config, results=results).save(args.out)


if __name__ == "__main__":
    main()
