"""Does what routing costs eat what skipping saves? Each method's speed beside static pruning.

Takes the models that `compare_methods.py` has trained. Each method runs at its own threshold and at
those that were found for --depths; a method that keeps a budget at these depths themselves. Beside
it, in turn and on the same prompts, runs one static order at the depth that the method ran.

    python benchmarks/method_speed.py \
        --prompts alpaca=data/alpaca/train.jsonl:8063:8069 --out results/training/method-speed.json
"""

import statistics
from pathlib import Path

import torch
from compare_methods import OWN, PUDDING_LORA, RIVALS, unseen_rows

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_all
from buddy.generation.trace import DepthTrace
from buddy.lab import experiment
from buddy.records import read_record

METHODS = {
    "buddy": "Buddy",
    **{name: rival.label for name, rival in RIVALS.items()},
    PUDDING_LORA: "PuDDing, LoRA",
}


def main():
    """Time, record, print."""
    args = read_arguments()
    torch.set_num_threads(args.threads)
    beside = load(args.runs / "joined")
    prompts = prompts_of(args)
    timings = []
    for name in args.only or METHODS:
        folder = args.runs / name
        if not (folder / "checkpoint").exists():
            print(f"{name}: not trained")
            continue
        model = load(folder)
        for label, policy, budget in settings(name, folder, args.depths):
            if policy is not None:
                model.set_policy(policy)
            timings.append({"method": METHODS[name], "at": label, "policy": policy})
            timings[-1].update(timed(model, beside, prompts, budget, args))
            print(said(timings[-1]), flush=True)
    names = ("prompts", "tokens", "rounds", "threads")
    config = {"runs": str(args.runs), **{name: getattr(args, name) for name in names}}
    experiment.save(args.out, "method-speed", {"timings": timings}, config=config)


def read_arguments():
    """The command line."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"))
    parser.add_argument(
        "--prompts", type=unseen_rows, required=True, metavar="NAME=FILE:START:STOP"
    )
    parser.add_argument("--depths", default="22,15")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a timed answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", choices=METHODS)
    return parser.parse_args()


def load(folder):
    """A trained model, its adapters merged as for serving."""
    return BuddyForCausalLM.from_pretrained(folder / "checkpoint", merge_adapter=True)


def prompts_of(args):
    """Token ids of each."""
    _, path, start, stop = args.prompts
    tokenizer = load_tokenizer(str(args.runs / "joined" / "checkpoint"))
    rows = read_all((Source(path=path, start=start, stop=stop),), tokenizer, max_tokens=256)
    return [torch.tensor([row.prompt]) for row in rows]


def settings(name, folder, depths):
    """Label, policy (the model's own if None) and budget of each setting that is timed."""
    wanted = depths.split(",")
    if name not in RIVALS or RIVALS[name].keeps_budget:
        return [(depth, None, f"{depth} blocks") for depth in wanted]
    found = read_record(folder / "thresholds.json")["results"]["thresholds"]
    spec = {depth: f"{name}:{found_at['threshold']:.9g}" for depth, found_at in found.items()}
    at = [(depth, spec[depth], None) for depth in wanted if depth in spec]
    return [(OWN, name, None), *at]


def timed(model, beside, prompts, budget, args):
    """Prefill and decode beside one static order at the depth that the method ran: medians."""
    depth = statistics.fmean(one_round(model, prompts, args.tokens, budget)["blocks"])
    static = f"{round(depth)} blocks"
    one_round(beside, prompts, args.tokens, static)
    rounds = [
        (
            one_round(model, prompts, args.tokens, budget),
            one_round(beside, prompts, args.tokens, static),
        )
        for _ in range(args.rounds)
    ]
    return {
        "mean_blocks": depth,
        "engine": rounds[0][0]["engine"],
        "static_engine": rounds[0][1]["engine"],
        **{
            f"{phase}_over_static": experiment.median(b[phase] / a[phase] for a, b in rounds)
            for phase in ("prefill", "decode")
        },
        "decode_tokens_per_s": experiment.median(len(a["blocks"]) / a["decode"] for a, _ in rounds),
    }


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


def said(timing):
    """A line of the terminal."""
    return (
        f"{timing['method']:18} {timing['at']:>4} {timing['mean_blocks']:5.1f} blocks: prefill "
        f"{timing['prefill_over_static']:.2f}, decode {timing['decode_over_static']:.2f} of static"
    )


if __name__ == "__main__":
    experiment.run(main)
