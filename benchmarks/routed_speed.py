"""How much faster is half the depth, and what does routing cost at full depth?

Decode and prefill at several budgets and with transformers' own `generate`, interleaved in one
run, so that a drift of the machine meets all alike. A decode step's time is the median over a
generation, sampling included; a ratio is taken within each round, and its median reported.

    python benchmarks/routed_speed.py --out results/routed-speed.json
"""

import argparse
import itertools
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
from buddy.routing.router import Router, RouterConfig

BUDGETS = (1.0, 0.75, 0.5)
DENSE = {"static 100%": "own_dense", "transformers": "transformers"}


def changing_router(model: BuddyForCausalLM) -> Router:
    """A random router with a short memory: its plans change at nearly every step."""
    from buddy.routing.context import PlannerConfig

    torch.manual_seed(0)
    router = Router(
        RouterConfig(
            num_blocks=model.num_blocks,
            token_width=model.backbone.kv_width,
            planner=PlannerConfig(summary="ema", ema_decay=0.5),
        )
    )
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    return router


def measure(run) -> dict[str, float]:
    """Seconds of the prefill, and of a decode step, of one generation."""
    trace = DepthTrace()
    run(trace)
    ends = [step.ended_s for step in trace.steps]
    return {
        "prefill_s": ends[0] - trace.steps[0].started_s,
        "decode_s": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "distinct_plans": trace.distinct_plans,
    }


def measure_transformers(model, ids, new_tokens) -> dict[str, float]:
    """The same of transformers' own `generate`, by its streamer."""
    times = []

    class Clock:
        def put(self, value):
            times.append(time.perf_counter())

        def end(self):
            pass

    model.generate(
        ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, streamer=Clock()
    )
    return {
        "prefill_s": times[1] - times[0],
        "decode_s": statistics.median(b - a for a, b in itertools.pairwise(times[1:])),
        "distinct_plans": 1,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    static = BuddyForCausalLM.from_pretrained(DEFAULT_MODEL)
    routed = BuddyForCausalLM(static.model, router=changing_router(static))
    torch.manual_seed(0)
    ids = torch.randint(100, 40_000, (1, args.prompt_tokens))

    def generation(model, budget):
        return lambda: measure(
            lambda trace: model.generate(
                ids,
                budget=budget,
                max_new_tokens=args.new_tokens,
                min_new_tokens=args.new_tokens,
                do_sample=False,
                trace=trace,
            )
        )

    runs = {"transformers": lambda: measure_transformers(static.model, ids, args.new_tokens)}
    runs |= {f"static {budget:.0%}": generation(static, budget) for budget in BUDGETS}
    runs |= {f"routed {budget:.0%}": generation(routed, budget) for budget in BUDGETS[1:]}
    samples = {name: [] for name in runs}
    for done in track(range(args.rounds + 1), "Measuring", console=Console(file=sys.stderr)):
        for name, run in runs.items():
            sample = run()
            if done:  # the first round warms up
                samples[name].append(sample)
    median = {
        name: {key: statistics.median(s[key] for s in taken) for key in taken[0]}
        for name, taken in samples.items()
    }

    def ratio(name, other, key):
        rounds = [b[key] / a[key] for a, b in zip(samples[name], samples[other], strict=True)]
        return {"median": statistics.median(rounds), "min": min(rounds), "max": max(rounds)}

    rows = {
        name: {
            "prefill_tokens_per_s": args.prompt_tokens / m["prefill_s"],
            "decode_tokens_per_s": 1 / m["decode_s"],
            "distinct_plans": m["distinct_plans"],
            **{
                f"{phase}_speedup_over_{DENSE[other]}": ratio(name, other, f"{phase}_s")
                for phase in ("prefill", "decode")
                for other in DENSE
            },
        }
        for name, m in median.items()
    }
    RunRecord(
        kind="routed-speed",
        command=f"python benchmarks/routed_speed.py --out {args.out} "
        f"--prompt-tokens {args.prompt_tokens} --new-tokens {args.new_tokens} "
        f"--rounds {args.rounds}",
        config={
            "model": DEFAULT_MODEL,
            "dtype": str(static.dtype),
            "threads": torch.get_num_threads(),
            "kv_policy": static.kv_policy,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
        },
        results=rows,
    ).save(args.out)
    table = Table("run", "prefill tok/s", "x dense", "decode tok/s", "x dense", "x hf")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['prefill_speedup_over_own_dense']['median']:.2f}",
            f"{row['decode_tokens_per_s']:.1f}",
            f"{row['decode_speedup_over_own_dense']['median']:.2f}",
            f"{row['decode_speedup_over_transformers']['median']:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
