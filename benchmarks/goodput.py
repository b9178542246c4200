"""How many good answers does a server give under load: at full depth, at half, or as it can?

One `buddy serve` with promises for the time to the first token and the time between tokens, and
open-loop Poisson loads on it, one after another in a random order: requests that name full depth,
requests that name half of it, and requests that name nothing, which the server's controller may
lower. All three get the same requests at the same times; each repeat draws others. A good answer
keeps both promises. Writes a record for each of the three, which
`buddy plot load` draws together.

    python benchmarks/goodput.py --out results/serving
"""

import random
from pathlib import Path

from rich.console import Console
from rich.progress import track
from served import served

from buddy.files import check_writable
from buddy.lab import experiment
from buddy.lab.load.load import PROMPTS, LoadConfig, run_load

LABELS = {
    "full": ("1.0", "all blocks, always"),
    "half": ("0.5", "half of the blocks, always"),
    "controller": ("none", "chosen by the controller"),
}
"""Loads by name: the budget that requests name, and the label of its line."""


def read_arguments():
    """The command line."""
    parser = experiment.arguments(__doc__, out=False)
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--rates", default="1,2,3,4,6,9", help="requests a second")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of each load")
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind and rate")
    parser.add_argument("--max-tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--max-rows", type=int, default=32)
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    parser.add_argument("--slo-itl-ms", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    return parser.parse_args()


def main():
    """Measure, show, record."""
    args = read_arguments()
    for name in LABELS:
        check_writable(args.out / f"{name}.json")
    rates = [float(rate) for rate in args.rates.split(",")]
    console = Console(stderr=True)
    promised = ("--slo-ttft-ms", args.slo_ttft_ms, "--slo-itl-ms", args.slo_itl_ms)

    def load(url, name, rate, seed):
        config = LoadConfig(
            url=url,
            rates=(rate,),
            duration_s=args.duration,
            budgets=((LABELS[name][0], 1.0),),
            max_tokens=args.max_tokens,
            slo_ttft_ms=args.slo_ttft_ms,
            slo_itl_ms=args.slo_itl_ms,
            seed=seed,
        )
        return run_load(config)

    cases = [(r, name, rate) for r in range(args.repeats) for name in LABELS for rate in rates]
    random.Random(0).shuffle(cases)
    cases.sort(key=lambda case: case[0])
    found = {name: {"points": [], "requests": []} for name in LABELS}
    with served(args.model, *promised, "--min-budget", 0.5, "--max-rows", args.max_rows) as (
        url,
        _,
    ):
        load(url, "controller", 1.0, 0)  # warms up
        for repeat, name, rate in track(cases, console=console, transient=True):
            made = load(url, name, rate, repeat)
            (point,) = made["points"]
            found[name]["points"].append({"repeat": repeat, **point})
            found[name]["requests"] += [{"repeat": repeat, **asked} for asked in made["requests"]]
            console.print(
                f"{name:<10} {rate:5.1f}/s: {point['goodput_rps']:5.2f} good answers/s, "
                f"{point['blocks_per_token'] or 0:4.1f} blocks a token"
            )
    for name, (budget, label) in LABELS.items():
        found[name]["points"].sort(key=lambda point: (point["rate"], point["repeat"]))
        config = {**experiment.texts(args), "label": label, "budgets": [[budget, 1.0]]}
        config |= {"prompts": "built-in", "distinct_prompts": len(PROMPTS)}
        experiment.save(args.out / f"{name}.json", "serving-load", found[name], config=config)


if __name__ == "__main__":
    experiment.run(main)
