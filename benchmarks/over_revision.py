"""Is this source tree faster than another one? Decode and prefill, in alternating processes.

Each tree has a process of its own, which waits while the other one works. A round runs one
generation in each, in a new order; a ratio is taken within a round, and its median is reported.

    git worktree add ../before REVISION
    python benchmarks/over_revision.py --other ../before --out results/over-revision.json
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from pathlib import Path

from turns import Engine, answer_lines

HERE = Path(__file__).resolve().parents[1]
BUDGETS = (1.0, 0.5)


def generating(args):
    """What generates once at a budget, and says the seconds of a decode step and of the prefill."""
    import torch

    from buddy import BuddyForCausalLM, DepthTrace

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    ids = torch.randint(100, 40_000, (args.batch, args.context))

    def timed(budget):
        trace = DepthTrace()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            budget=budget,
            max_new_tokens=args.new_tokens,
            do_sample=False,
            eos_token_id=None,
            trace=trace,
        )
        # The other tree may be older than what the lab has for this.
        ends = [step.ended_s for step in trace.steps]
        return {
            "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
            "prefill_s": ends[0] - trace.steps[0].started_s,
        }

    return timed, model.facts()


def read_arguments():
    """The command line."""
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
    return parser.parse_args()


def main():
    """Measure, show, record."""
    args = read_arguments()
    if args.work:
        answer_lines(lambda: generating(args))
        return
    from buddy.lab import experiment

    other = args.other.resolve()
    command = [sys.executable, __file__, "--work", *sys.argv[1:]]
    trees = {
        name: Engine(command, {"PYTHONPATH": str(path / "src")})
        for name, path in (("this", HERE), ("other", other))
    }
    seen = experiment.take_turns(
        list(trees), BUDGETS, args.rounds, lambda name, budget: trees[name].ask(budget)
    )
    for tree in trees.values():
        tree.end()
    cells = {}
    for budget, phase in itertools.product(BUDGETS, ("decode_s", "prefill_s")):
        pairs = [(times["this"][phase], times["other"][phase]) for times in seen[budget]]
        ratios = [other / this for this, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells[f"{phase} {budget}"] = {
            "this_s": experiment.median(this for this, _ in pairs),
            "other_s": experiment.median(other for _, other in pairs),
            "speed_over_other": middle,
            "quartiles": [low, high],
            "ratios": ratios,
        }
        print(f"{phase} {budget:<4} x{middle:.3f}  half of the rounds in {low:.3f} to {high:.3f}")
    if args.out:
        revision = ["git", "-C", str(other), "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(revision, capture_output=True, text=True, check=False).stdout
        config = {**experiment.texts(args), "revision": commit.strip()}
        facts = trees["this"].facts
        experiment.save(args.out, "over-revision", cells, config=config, model=facts)


if __name__ == "__main__":
    main()
