"""Is this source tree faster than another one? Decode and prefill, in alternating processes.

Each tree has a process of its own, which waits while the other one works. A round runs one
generation in each, in a new order; a ratio is taken within a round, and its median is reported.

    git worktree add ../before REVISION
    python benchmarks/over_revision.py --other ../before --out results/over-revision.json
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
BUDGETS = (1.0, 0.5)
FACTS = "facts"


def work(args):
    """Generate once for each budget that comes in: seconds of a decode step and of the prefill."""
    import torch

    from buddy import BuddyForCausalLM, DepthTrace

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    ids = torch.randint(100, 40_000, (args.batch, args.context))
    for line in sys.stdin:
        if line.strip() == FACTS:
            print(json.dumps(model.facts()), flush=True)
            continue
        trace = DepthTrace()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            budget=float(line),
            max_new_tokens=args.new_tokens,
            do_sample=False,
            eos_token_id=None,
            trace=trace,
        )
        ends = [step.ended_s for step in trace.steps]
        steps_s = [b - a for a, b in itertools.pairwise(ends)]
        found = {
            "decode_s": statistics.median(steps_s),
            "prefill_s": ends[0] - trace.steps[0].started_s,
        }
        print(json.dumps(found), flush=True)


class Tree:
    """A process that works on one source tree."""

    def __init__(self, path):
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", *sys.argv[1:]],
            env={**os.environ, "PYTHONPATH": str(path / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what):
        """One generation at a budget, or the facts of the model."""
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self):
        """Let the process go."""
        self._process.stdin.close()
        self._process.wait()


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
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    trees = {"this": Tree(HERE), "other": Tree(args.other.resolve())}
    draw, seen = random.Random(0), {budget: [] for budget in BUDGETS}
    for number in range(args.rounds + 1):
        for budget in BUDGETS:
            order = draw.sample(list(trees), len(trees))
            made = {name: trees[name].ask(budget) for name in order}
            if number:  # the first round warms up
                seen[budget].append(made)
    facts = trees["this"].ask(FACTS)
    for tree in trees.values():
        tree.end()
    cells = {}
    for budget, phase in itertools.product(BUDGETS, ("decode_s", "prefill_s")):
        pairs = [(made["this"][phase], made["other"][phase]) for made in seen[budget]]
        ratios = [other / this for this, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells[f"{phase} {budget}"] = {
            "this_s": statistics.median(this for this, _ in pairs),
            "other_s": statistics.median(other for _, other in pairs),
            "speed_over_other": middle,
            "quartiles": [low, high],
            "ratios": ratios,
        }
        print(f"{phase} {budget:<4} x{middle:.3f}  half of the rounds in {low:.3f} to {high:.3f}")
    if args.out:
        from buddy.records import RunRecord

        revision = ["git", "-C", str(trees["other"].path), "rev-parse", "--short=12", "HEAD"]
        told = subprocess.run(revision, capture_output=True, text=True, check=False).stdout.strip()
        RunRecord(
            kind="over-revision",
            model=facts,
            config={**{key: str(value) for key, value in vars(args).items()}, "revision": told},
            results=cells,
        ).save(args.out)


if __name__ == "__main__":
    main()
