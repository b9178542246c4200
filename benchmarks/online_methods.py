"""Methods that keep no budget: trained alike, and compared at depths that their thresholds meet.

Each method is trained by its own recipe, in a folder of its own that a later run goes on from. For
each wanted depth a threshold is searched at which tokens run as many blocks on average (rows of
--calibrate). At those thresholds answers are measured on unseen rows, beside one model that was
trained on the same rows for as many steps under random budgets and one static order. Then all are
timed in turn, on the same prompts: does what routing costs eat what skipping saves?

    python benchmarks/online_methods.py --rows runs/mix-validation.jsonl:0:200 \
        --calibrate data/alpaca/train.jsonl:8200:8216 --prompts data/alpaca/train.jsonl:8230:8236 \
        --out results/training/online-methods.json
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from compare_methods import unseen_rows
from reuse import is_measured, is_trained

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_all
from buddy.errors import TrainingError
from buddy.generation.trace import DepthTrace
from buddy.records import RunRecord, read_record
from buddy.training.exits.threshold import find_threshold, mean_depth
from buddy.training.methods import read_method

METHODS = ("first", "d-llm", "mixture-of-depths", "flexidepth", "dash")
ORDER = "static:results/importance/shortgpt-sleb.json"
STATIC = [
    "router.orders=[]",
    f"router.policy={ORDER}",
    'log.evaluate_budgets=["1.0"]',
]


def main():
    """Train, search, measure, time, record."""
    args = read_arguments()
    static = args.runs / "static"
    train(Path("recipes/comparison.toml"), static, [*STATIC, *args.set])
    points, timings = [], []
    for name in args.only or METHODS:
        recipe, folder = Path("recipes") / f"{name}.toml", args.runs / name
        train(recipe, folder, args.set)
        found = thresholds(name, folder / "checkpoint", args)
        specs = [f"{name}:{threshold:.6g}" for threshold, _ in found]
        points += answers(args, folder, folder / "answers.json", specs, ["1.0"], name)
        depths = sorted({round(depth) for _, depth in found})
        beside = [f"{depth} blocks" for depth in depths]
        out = static / f"answers-{'-'.join(map(str, depths))}.json"
        points += answers(args, static, out, [ORDER], beside, "static")
        timings += timed(args, name, folder, static, specs)
    record = RunRecord(
        kind="online-methods",
        model=None,
        config={
            **{key: str(value) for key, value in vars(args).items()},
            "recipes": {one: (Path("recipes") / f"{one}.toml").read_text() for one in METHODS},
        },
        results={"points": points, "timings": timings},
    )
    record.save(args.out)
    for point in points:
        depth = point.get("mean_blocks", point["blocks"])
        print(
            f"{point['method']:18} {depth:5.1f} blocks {point['value']:.3f} ± {point['stderr']:.3f}"
        )
    for one in timings:
        print(one)


def read_arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/online"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=rows, required=True, metavar="FILE:START:STOP")
    parser.add_argument("--calibrate", type=rows, required=True, metavar="FILE:START:STOP")
    parser.add_argument("--prompts", type=rows, required=True, metavar="FILE:START:STOP")
    parser.add_argument("--depths", default="26,22")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a timed answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=METHODS)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


def rows(text):
    """FILE:START:STOP in its parts."""
    return unseen_rows(f"rows={text}")[1:]


def examples_of(place):
    """Rows of a file, in tokens of the default model."""
    path, start, stop = place
    source = Source(path=path, start=start, stop=stop)
    return read_all((source,), load_tokenizer("smollm2-135m"), max_tokens=256)


def train(recipe, folder, changes):
    """Train by a recipe, unless that is done."""
    _, settings = read_method(recipe, changes)
    if is_trained(folder, settings):
        return
    sets = [part for one in changes for part in ("--set", one)]
    buddy("train", recipe, "--out", folder, "--resume", *sets)


def buddy(*arguments):
    """Run a command of ours, and stop where it stops."""
    subprocess.run([sys.executable, "-m", "buddy", *map(str, arguments)], check=True)


def thresholds(name, checkpoint, args):
    """The method's own threshold and one for each wanted depth that can be met, with depths."""
    model = BuddyForCausalLM.from_pretrained(checkpoint)
    examples = examples_of(args.calibrate)

    def depth_at(unlikely):
        model.set_policy(f"{name}:{1 - unlikely:.6g}")
        return mean_depth(model, model.policy, examples)

    found = [(0.5, depth_at(0.5))]
    for wanted in map(int, args.depths.split(",")):
        try:
            unlikely, depth = find_threshold(
                depth_at, wanted, least=depth_at(0.0), most=depth_at(1.0), tolerance=0.5
            )
        except TrainingError as error:
            print(f"{name}: {error}")
            continue
        found.append((float(f"{1 - unlikely:.6g}"), depth))
    return found


def answers(args, folder, out, specs, budgets, method):
    """Answer losses of one model under some policies."""
    path, start, stop = args.rows
    arguments = ["eval", "answers", path, "--start", start, "--stop", stop, "--max-tokens", 192]
    arguments += ["--model", folder / "checkpoint", "--out", out]
    arguments += [part for one in budgets for part in ("-b", one)]
    arguments += [part for one in specs for part in ("--policy", one)]
    if not is_measured(out, arguments, folder / "checkpoint"):
        buddy(*arguments)
    points = read_record(out)["results"]["points"]
    mine = [one for one in points if (one["task"], one["metric"]) == ("all", "answer_nll")]
    return [{**one, "method": method} for one in mine]


def timed(args, name, folder, static, specs):
    """Prefill and decode of the method at each threshold beside static pruning at its depth."""
    merged = {"merge_adapter": True}
    own = BuddyForCausalLM.from_pretrained(folder / "checkpoint", **merged)
    other = BuddyForCausalLM.from_pretrained(static / "checkpoint", **merged)
    prompts = [torch.tensor([one.prompt]) for one in examples_of(args.prompts)]
    found = []
    for spec in specs:
        own.set_policy(spec)
        depth = statistics.fmean(one_round(own, prompts, args.tokens, None)["blocks"])
        budget = f"{round(depth)} blocks"
        one_round(other, prompts, args.tokens, budget)
        rounds = [
            (
                one_round(own, prompts, args.tokens, None),
                one_round(other, prompts, args.tokens, budget),
            )
            for _ in range(args.rounds)
        ]
        found.append(
            {
                "method": name,
                "policy": spec,
                "mean_blocks": depth,
                "engine": rounds[0][0]["engine"],
                **{
                    f"{phase}_over_static": statistics.median(
                        b[phase] / a[phase] for a, b in rounds
                    )
                    for phase in ("prefill", "decode")
                },
            }
        )
    return found


@torch.inference_mode()
def one_round(model, prompts, tokens, budget):
    """Seconds of all prefills and of all decode steps, and the blocks of each decoded token."""
    seconds, blocks = {"prefill": 0.0, "decode": 0.0}, []
    for ids in prompts:
        trace = DepthTrace()
        model.generate(
            ids,
            budget=budget,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            trace=trace,
        )
        first, *rest = trace.steps
        seconds["prefill"] += first.ended_s - first.started_s
        seconds["decode"] += sum(step.ended_s - step.started_s for step in rest)
        blocks += [step.executed[0] for step in rest]
    return {**seconds, "blocks": blocks, "engine": trace.steps[-1].engine}


if __name__ == "__main__":
    main()
