"""What does depth cost in time? Decode and prefill of one model by budget, batch and context.

Every subject runs in every round, in a new order each time, beside transformers' own `generate` on
the same weights; a ratio is taken within a round and its median reported. The ideal is made of the
measured time of a block and the time outside blocks.

    python benchmarks/engine.py --out results/engine.json
"""

import argparse
import itertools
import random
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from buddy import BuddyForCausalLM, DepthTrace
from buddy.models.presets import DEFAULT_MODEL
from buddy.results import RunRecord
from buddy.routing.context import PlannerConfig
from buddy.routing.router import Router, RouterConfig

BUDGETS = (26, 22, 18, 15)


def changing_router(model):
    """A random router with a short memory: its plans change at nearly every step."""
    torch.manual_seed(0)
    planner = PlannerConfig(summary="ema", ema_decay=0.5)
    router = Router(
        RouterConfig(
            num_blocks=model.num_blocks, token_width=model.backbone.kv_width, planner=planner
        )
    )
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    return router


def decode_s(model, ids, new_tokens, **options):
    """Seconds of a decode step, of the prefill, and the share of the time that is in no block."""
    trace = DepthTrace()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        trace=trace,
        **options,
    )
    ends = [step.ended_s for step in trace.steps]
    return {
        "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "prefill_s": ends[0] - trace.steps[0].started_s,
        "plans": trace.distinct_plans,
    }


def theirs_s(model, ids, new_tokens):
    """The same of transformers' own loop."""
    times = []
    begin = model.register_forward_pre_hook(lambda *_: times.append(time.perf_counter()))
    end = model.register_forward_hook(lambda *_: times.append(time.perf_counter()))
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=None,
        )
    finally:
        begin.remove()
        end.remove()
    ends = times[1::2]
    return {
        "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "prefill_s": times[1] - times[0],
        "plans": 1,
    }


def kernel_shares(model, ids, new_tokens, **options):
    """Seconds a step in blocks, in filling holes and in the output projection."""
    decoder = model.decoder.native()
    model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, **options)
    decoder.seconds = torch.zeros(3, dtype=torch.float64)
    trace = DepthTrace()
    model.generate(
        ids, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, trace=trace, **options
    )
    blocks, fill, head = (decoder.seconds / (new_tokens - 1)).tolist()
    decoder.seconds = None
    return {"blocks_s": blocks, "fill_s": fill, "head_s": head}


def subjects(base, context, new_tokens, batch):
    """Name -> a run of one generation."""
    ids = torch.randint(100, base.config.vocab_size, (batch, context))
    static = BuddyForCausalLM(base.model, prior=base.prior)
    changing = BuddyForCausalLM(base.model, router=changing_router(base))
    runs = {
        "transformers": lambda: theirs_s(base.model, ids, new_tokens),
        "dense": lambda: decode_s(static, ids, new_tokens),
    }
    for blocks in BUDGETS:
        budget = f"{blocks} blocks"
        runs[f"stable {blocks}"] = lambda b=budget: decode_s(static, ids, new_tokens, budget=b)
        runs[f"changing {blocks}"] = lambda b=budget: decode_s(changing, ids, new_tokens, budget=b)
    if batch > 1:
        mixed = [f"{blocks} blocks" for blocks in (15, 17, 19, 21, 23, 26, 28, 30)][:batch]
        for way in ("shared", "independent"):
            runs[f"{way} 15"] = lambda w=way: decode_s(
                changing, ids, new_tokens, budget="15 blocks", batch_route=w
            )
            runs[f"{way} mixed"] = lambda w=way: decode_s(
                changing, ids, new_tokens, budget=mixed, batch_route=w
            )
    return runs, static, changing, ids


def measure(base, context, new_tokens, batch, rounds):
    """Medians, ratios within rounds, and the ideal."""
    runs, static, changing, ids = subjects(base, context, new_tokens, batch)
    order, seen = random.Random(0), {name: [] for name in runs}
    for number in track(range(rounds + 1), f"batch {batch}, context {context}", transient=True):
        for name in order.sample(list(runs), len(runs)):
            made = runs[name]()
            if number:  # the first round warms up
                seen[name].append(made)
    shares = {
        name: kernel_shares(model, ids, new_tokens, budget="15 blocks")
        for name, model in (("stable 15", static), ("changing 15", changing))
    }
    dense_s = statistics.median(one["decode_s"] for one in seen["dense"])
    in_blocks = kernel_shares(static, ids, new_tokens)["blocks_s"]
    cells = {}
    for name, made in seen.items():
        cell = {"plans": max(one["plans"] for one in made)}
        for phase in ("decode_s", "prefill_s"):
            own = [one[phase] for one in made]
            cell[phase] = statistics.median(own)
            for other in ("dense", "transformers"):
                ratios = [a[phase] / b for a, b in zip(seen[other], own, strict=True)]
                cell[f"{phase[:-2]}_over_{other}"] = statistics.median(ratios)
        word = name.split()[-1]
        if word.isdecimal():
            outside = dense_s - in_blocks
            ideal = dense_s / (outside + in_blocks * int(word) / base.num_blocks)
            cell["decode_ideal"] = ideal
            cell["decode_of_ideal"] = cell["decode_over_dense"] / ideal
        cells[name] = cell
    return {"batch": batch, "context": context, "cells": cells, "kernel": shares}


def show(console, result):
    """One table of a batch and a context."""
    table = Table(title=f"batch {result['batch']}, context {result['context']}")
    for name in ("", "tokens/s", "x dense", "x hf", "of ideal", "prefill x dense", "x hf", "plans"):
        table.add_column(name, justify="right")
    for name, cell in result["cells"].items():
        of_ideal = cell.get("decode_of_ideal")
        table.add_row(
            name,
            f"{result['batch'] / cell['decode_s']:.1f}",
            f"{cell['decode_over_dense']:.2f}",
            f"{cell['decode_over_transformers']:.2f}",
            "" if of_ideal is None else f"{of_ideal:.0%}",
            f"{cell['prefill_over_dense']:.2f}",
            f"{cell['prefill_over_transformers']:.2f}",
            str(cell["plans"]),
        )
    console.print(table)
    for name, parts in result["kernel"].items():
        step = result["cells"][name]["decode_s"]
        console.print(
            f"{name}: blocks {parts['blocks_s'] / step:.1%}, holes {parts['fill_s'] / step:.2%}, "
            f"head {parts['head_s'] / step:.1%} of a step of {1e3 * step:.2f} ms"
        )


def main():
    """Measure, show, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quant", choices=("int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="1x256", help="batch x context, as in 1x256,8x256")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    base = BuddyForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, quant=args.quant, merge_adapter=True
    )
    console, found = Console(stderr=True), []
    for shape in args.shapes.split(","):
        batch, context = map(int, shape.split("x"))
        found.append(measure(base, context, args.new_tokens, batch, args.rounds))
        show(console, found[-1])
    RunRecord(
        kind="engine",
        command=shlex.join(["python", *sys.argv]),
        config={key: str(value) for key, value in vars(args).items()},
        results={"shapes": found, "engine": base.decoder.describe()},
    ).save(args.out)


if __name__ == "__main__":
    main()
