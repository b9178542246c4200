"""How long does a warm `buddy generate` of one token take, beside what it cannot do without?

Both are whole processes, which take turns: `buddy generate` on the default model, to its end; and a
Python that imports torch and transformers' model class and does nothing else.

    python benchmarks/startup.py --out results/startup.json
"""

import subprocess
import sys
import time

from buddy.lab import experiment

COMMANDS = {
    "import": [sys.executable, "-c", "import torch; from transformers import LlamaForCausalLM"],
    "generate": [sys.executable, "-m", "buddy", "generate", "Hello", "--max-new-tokens", "1"],
}


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()

    def seconds(name, _):
        begun = time.perf_counter()
        subprocess.run(COMMANDS[name], check=True, capture_output=True)
        return time.perf_counter() - begun

    (rounds,) = experiment.take_turns(list(COMMANDS), [None], args.rounds, seconds).values()
    ratios = [times["generate"] / times["import"] for times in rounds]
    results = {
        **{f"{name}_s": experiment.median(times[name] for times in rounds) for name in COMMANDS},
        "ratio": experiment.median(ratios),
        "ratio_by_round": ratios,
    }
    print(
        f"generate {results['generate_s']:.2f} s, import {results['import_s']:.2f} s, "
        f"ratio {results['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    config = {"rounds": args.rounds, "new_tokens": 1}
    experiment.save(args.out, "startup", results, config=config)


if __name__ == "__main__":
    experiment.run(main)
