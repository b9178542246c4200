"""Is this source tree faster than another one? Decode and prefill, in alternating processes.

Each round runs every tree once, in a new order, each in a process of its own on the same weights; a
ratio is taken within a round, and its median is reported.

    git worktree add ../before REVISION
    python benchmarks/over_revision.py --other ../before --out results/over-revision.json
"""

import argparse
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
BUDGETS = (1.0, 0.5)


def work(args):
    """What a process of its own measures: seconds of a decode step and of the prefill."""
    import torch

    from buddy import BuddyForCausalLM, DepthTrace

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    ids = torch.randint(100, 40_000, (args.batch, args.context))
    found = {}
    for budget in BUDGETS:
        for repeat in range(3):
            trace = DepthTrace()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                budget=budget,
                max_new_tokens=args.new_tokens if repeat else 2,
                do_sample=False,
                eos_token_id=None,
                trace=trace,
            )
            ends = [step.ended_s for step in trace.steps]
            times = {
                "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
                "prefill_s": ends[0] - trace.steps[0].started_s,
            }
            if repeat:
                for name, seconds in times.items():
                    key = f"{name} {budget}"
                    found[key] = min(found.get(key, seconds), seconds)
    print(json.dumps(found))


def run(tree, args):
    """One process on one source tree."""
    command = [sys.executable, __file__, "--work", *sys.argv[1:]]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Measure, show, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True, help="a source tree of Buddy")
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    trees = {"this": HERE, "other": args.other.resolve()}
    order, seen = random.Random(0), []
    for _ in range(args.rounds):
        made = {name: run(trees[name], args) for name in order.sample(list(trees), len(trees))}
        seen.append(made)
    cells = {}
    for key in seen[0]["this"]:
        ratios = [made["other"][key] / made["this"][key] for made in seen]
        cells[key] = {
            "this_s": statistics.median(made["this"][key] for made in seen),
            "other_s": statistics.median(made["other"][key] for made in seen),
            "speed_over_other": statistics.median(ratios),
            "ratios": ratios,
        }
        print(f"{key:16} x{cells[key]['speed_over_other']:.3f} {[round(r, 3) for r in ratios]}")
    if args.out:
        from buddy.records import RunRecord

        revision = ["git", "-C", str(trees["other"]), "rev-parse", "--short=12", "HEAD"]
        told = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
        RunRecord(
            kind="over-revision",
            command=shlex.join(["python", *sys.argv]),
            config={**{key: str(value) for key, value in vars(args).items()}, "revision": told},
            results=cells,
        ).save(args.out)


if __name__ == "__main__":
    main()
