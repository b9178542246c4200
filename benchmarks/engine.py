r"""What does depth cost in time? Decode and prefill of one model by budget, batch and context.

Every subject runs in every round, in a new order each time, beside transformers' own `generate` on
the same weights; a ratio is taken within a round and its median reported. A batch costs what it
reads: the ideal of a round is its dense step, less that step's time in the blocks that no row of
the batch runs. "changed" is the share of steps at which a row's plan was another one than before.
"of memory" is the bytes of weights that a dense step reads a second, over what summing a large
tensor reads in the same round.

    python benchmarks/engine.py --out results/engine.json
    python benchmarks/engine.py --random llama-3-8b --device cuda --out results/llama-3-8b.json
    BUDDY_NATIVE=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        python benchmarks/engine.py --subjects "transformers,dense" --out results/engine-avx2.json

With `--random` the weights are random numbers in the shape of a model, and nothing is fetched.
`--beside int8` runs the same model with weights of fewer bits too, dense and at half its depth. The
last example shows what another machine would do, ours and torch's kernels restricted alike.
"""

import itertools
import os
import statistics
import sys
import time

import torch
from shapes import SHAPES, random_model
from transformers import LogitsProcessorList

from buddy import BuddyForCausalLM, DepthTrace
from buddy.engine.executors.native.decoder import NativeDecoder
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment

SHARES = (0.875, 0.75, 0.625, 0.5)
ALWAYS = ("transformers", "dense")
"""Subjects that ratios are taken over."""
MEMORY = "memory"
"""What the machine reads a second, measured in turn with the subjects."""
RESTRICTIONS = ("BUDDY_NATIVE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Variables that keep instructions from a kernel."""


def decode_s(model, ids, new_tokens, **options):
    """Seconds of a decode step and of the prefill; plans, and how often a plan was another one.

    Where decode steps are the kernel's, also its seconds in blocks, in filling holes and in the
    output projection, of the same steps.
    """
    trace, executor = DepthTrace(), model.executor.fast_path()
    is_kernel = isinstance(executor, NativeDecoder)

    def after_prefill(_, logits):
        if is_kernel and len(trace.steps) == 1:
            executor.seconds = torch.zeros(3, dtype=torch.float64)
        return logits

    processors = LogitsProcessorList([after_prefill])
    experiment.generate(model, ids, new_tokens, trace=trace, logits_processor=processors, **options)
    steps = len(trace.steps) - 1
    found = {
        **experiment.phase_seconds(trace),
        "plans": trace.distinct_plans,
        "changed": trace.changes / (steps * len(ids)),
        "read": statistics.mean(len(set().union(*step.plans)) for step in trace.steps[1:]),
    }
    if is_kernel:
        blocks, fill, head = (executor.seconds / steps).tolist()
        executor.seconds = None
        mean = (trace.steps[-1].ended_s - trace.steps[0].ended_s) / steps
        found |= {"mean_s": mean, "blocks_s": blocks, "fill_s": fill, "head_s": head}
    return found


def theirs_s(model, ids, new_tokens):
    """The same of transformers' own loop."""
    times = []

    def note(*_):
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    begin = model.register_forward_pre_hook(note)
    end = model.register_forward_hook(note)
    try:
        experiment.generate(model, ids, new_tokens, repetition_penalty=None)
    finally:
        begin.remove()
        end.remove()
    ends = times[1::2]
    return {
        "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "prefill_s": times[1] - times[0],
        "plans": 1,
        "changed": 0.0,
    }


def subjects(base, context, new_tokens, batch, fewer_bits):
    """Name -> a run of one generation."""
    ids = torch.randint(100, base.config.vocab_size, (batch, context)).to(base.device)
    order = ",".join(map(str, range(1, base.num_blocks - 1)))
    policies = {"static": f"static:{order}" if base.prior is None else "static", "random": "random"}
    if base.router is not None:
        policies["routed"] = "routed"
    models = {
        name: BuddyForCausalLM(base.model, prior=base.prior, router=base.router, policy=policy)
        for name, policy in policies.items()
    }
    runs = {
        "transformers": lambda: theirs_s(base.model, ids, new_tokens),
        "dense": lambda: decode_s(models["static"], ids, new_tokens),
    }
    for share, (name, model) in itertools.product(SHARES, models.items()):
        blocks = round(share * base.num_blocks)
        runs[f"{name} {blocks}"] = lambda m=model, b=blocks: decode_s(
            m, ids, new_tokens, budget=f"{b} blocks"
        )
    half = round(SHARES[-1] * base.num_blocks)
    for bits, model in fewer_bits.items():
        for name, budget in ((bits, 1.0), (f"{bits} {half}", f"{half} blocks")):
            runs[name] = lambda m=model, b=budget: decode_s(m, ids, new_tokens, budget=b)
    if batch > 1:
        mixed = [0.5 + 0.5 * row / (batch - 1) for row in range(batch)]
        for way in ("shared", "independent"):
            runs[f"{way} {half}"] = lambda w=way: decode_s(
                models["random"], ids, new_tokens, budget=f"{half} blocks", batch_route=w
            )
            runs[f"{way} mixed"] = lambda w=way: decode_s(
                models["random"], ids, new_tokens, budget=mixed, batch_route=w
            )
    return runs


def of_ideal(dense, made, num_blocks):
    """The share of the ideal: a dense step of the same round, less the blocks that nobody runs."""
    ideal_s = dense["mean_s"] - dense["blocks_s"] * (1 - made["read"] / num_blocks)
    return ideal_s / made["mean_s"]


def read_bytes_per_s(large):
    """What summing a large tensor reads, the better of two."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        large.sum().item()
        times.append(time.perf_counter() - start)
    return large.nbytes / min(times)


def measure(base, context, new_tokens, batch, rounds, *, fewer_bits, wanted):
    """Medians, and ratios and shares of the ideal within rounds."""
    runs = subjects(base, context, new_tokens, batch, fewer_bits)
    unknown = set(wanted) - runs.keys()
    if unknown:
        sys.exit(f"no subject {min(unknown)!r} in this shape: expected {', '.join(runs)}")
    runs = {name: run for name, run in runs.items() if not wanted or name in (*wanted, *ALWAYS)}
    large = torch.ones(2**26, dtype=torch.int64, device=base.device)
    runs[MEMORY] = lambda: read_bytes_per_s(large)
    (found,) = experiment.take_turns(
        list(runs),
        [None],
        rounds,
        lambda name, _: runs[name](),
        title=f"batch {batch}, context {context}",
    ).values()
    seen = {name: [results[name] for results in found] for name in runs}
    read = seen.pop(MEMORY)
    cells = {}
    for name, made in seen.items():
        cell = {
            "plans": max(result["plans"] for result in made),
            "changed": statistics.mean(result["changed"] for result in made),
        }
        for phase in ("decode_s", "prefill_s"):
            own = [result[phase] for result in made]
            cell[phase] = statistics.median(own)
            for other in ("dense", "transformers"):
                ratios = [a[phase] / b for a, b in zip(seen[other], own, strict=True)]
                cell[f"{phase[:-2]}_over_{other}"] = statistics.median(ratios)
        for part in ("blocks_s", "fill_s", "head_s", "mean_s"):
            if part in made[0]:
                cell[part] = statistics.median(result[part] for result in made)
        if "mean_s" in made[0] and not name.startswith(("dense", "int")):
            cell["read"] = statistics.mean(result["read"] for result in made)
            shares = [
                of_ideal(dense, result, base.num_blocks)
                for dense, result in zip(seen["dense"], made, strict=True)
            ]
            cell["decode_of_ideal"] = statistics.median(shares)
            cell["decode_of_ideal_by_round"] = shares
        cells[name] = cell
    num_bytes = weight_bytes(base)
    shares = [
        num_bytes / result["decode_s"] / rate
        for result, rate in zip(seen["dense"], read, strict=True)
    ]
    return {
        "batch": batch,
        "context": context,
        "cells": cells,
        "weight_bytes_per_s": num_bytes / cells["dense"]["decode_s"],
        "read_bytes_per_s": statistics.median(read),
        "of_memory": statistics.median(shares),
        "of_memory_by_round": shares,
    }


def weight_bytes(base):
    """Read in a dense step: blocks and output projection."""
    parts = (base.backbone.blocks, base.backbone.head)
    return sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers()))


def copy_bytes_per_s(device):
    """What copying a large tensor reaches, best of ten: the limit beside the figures."""
    source = torch.empty(2**28 if device == "cpu" else 2**31, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(10):
        start = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def show(result):
    """One table of a batch and a context."""
    ratios = ("decode_over_dense", "decode_over_transformers")
    more = ("prefill_over_dense", "prefill_over_transformers")
    experiment.show(
        f"batch {result['batch']}, context {result['context']}",
        ("", "tokens/s", "x dense", "x hf", "of ideal", "prefill", "x hf", "plans", "changed"),
        [
            (
                name,
                f"{result['batch'] / cell['decode_s']:.1f}",
                *(f"{cell[ratio]:.2f}" for ratio in ratios),
                f"{cell['decode_of_ideal']:.0%}" if "decode_of_ideal" in cell else "",
                *(f"{cell[ratio]:.2f}" for ratio in more),
                cell["plans"],
                f"{cell['changed']:.0%}",
            )
            for name, cell in result["cells"].items()
        ],
    )
    print(
        f"a dense step reads {result['weight_bytes_per_s'] / 1e9:.1f} GB/s of weights, "
        f"{result['of_memory']:.0%} of memory's {result['read_bytes_per_s'] / 1e9:.1f} GB/s",
        file=sys.stderr,
    )


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default=ROUTED_MODEL)
    parser.add_argument("--random", choices=sorted(SHAPES), help="random weights in this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--beside", default="", help="int8, int4 or both, with a comma between")
    parser.add_argument("--subjects", default="", help="these alone, with commas between")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="1x256", help="batch x context, as in 1x256,8x256")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if args.random:
        base = BuddyForCausalLM(random_model(args.random, args.device))
    else:
        base = BuddyForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, merge_adapter=True
        ).to(args.device)
    fewer_bits = {}
    for bits in filter(None, args.beside.split(",")):
        fewer_bits[bits] = BuddyForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, quant=bits, merge_adapter=True
        )
        fewer_bits[bits].set_policy("static")
    wanted = list(filter(None, args.subjects.split(",")))
    found = []
    for shape in args.shapes.split(","):
        batch, context = map(int, shape.split("x"))
        found.append(
            measure(
                base,
                context,
                args.new_tokens,
                batch,
                args.rounds,
                fewer_bits=fewer_bits,
                wanted=wanted,
            )
        )
        show(found[-1])
    restricted = {name: os.environ[name] for name in RESTRICTIONS if name in os.environ}
    config = {**experiment.texts(args), "restricted": restricted}
    results = {
        "shapes": found,
        "engine": base.executor.name,
        "instructions": base.executor.instructions,
        "copy_bytes_per_s": copy_bytes_per_s(args.device),
    }
    experiment.save(args.out, "engine", results, config=config, model=base.facts())


if __name__ == "__main__":
    experiment.run(main)
