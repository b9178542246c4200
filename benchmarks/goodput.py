"""How many good answers does a server give under load: at full depth, at half, or as it can?

One `buddy serve` with promises for the time to the first token and the time between tokens, and
open-loop Poisson loads on it, one after another in a random order: requests that name full depth,
requests that name half of it, and requests that name nothing, which the server's controller may
lower. All get the same requests at the same times; each repeat draws others. A good answer
keeps both promises. Writes a record for each kind of request, which
`buddy plot load` draws together.

    python benchmarks/goodput.py --out results/serving

Servers of others on the same weights, untuned, stand beside it where they are named: vLLM by the
Python of its environment, llama.cpp by its llama-server and a GGUF file. Each is stopped while
another one is asked.

    python benchmarks/goodput.py --vllm VENV/bin/python --llama-server PATH --gguf FILE --out DIR
"""

import random
import sys
from contextlib import ExitStack
from pathlib import Path

from other_servers import awake, free_port, llama_command, started, vllm_command
from rich.console import Console
from rich.progress import track
from served import served

from buddy.checkpoint.resolve import resolve
from buddy.files import check_writable
from buddy.lab import experiment
from buddy.lab.load.load import PROMPTS, LoadConfig, run_load

LABELS = {
    "full": ("1.0", "all blocks, always"),
    "half": ("0.5", "half of the blocks, always"),
    "controller": ("none", "chosen by the controller"),
}
"""Loads by name: the budget that requests name, and the label of its line."""
OTHERS = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}
"""Other servers by name, and their labels; requests name no budget there."""


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
    parser.add_argument("--vllm", help="the Python of an environment that has vLLM")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf", help="the base model's weights in bfloat16, for llama.cpp")
    parser.add_argument("--threads", type=int, default=2, help="cores of each server")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    if (args.llama_server is None) != (args.gguf is None):
        sys.exit("llama.cpp needs both: expected --llama-server PATH and --gguf FILE")
    return args


def other_commands(args):
    """The command of each other server that was named, given a port, by name."""
    commands = {}
    if args.vllm:
        folder = str(resolve(args.model).base.folder())
        commands["vllm"] = lambda port: vllm_command(args.vllm, folder, args.max_rows, port)
    if args.llama_server:
        commands["llama.cpp"] = lambda port: llama_command(
            args.llama_server, args.gguf, args.max_rows, args.threads, port
        )
    return commands


def main():
    """Measure, show, record."""
    args = read_arguments()
    commands = other_commands(args)
    labels = {**LABELS, **{name: ("none", OTHERS[name]) for name in commands}}
    for name in labels:
        check_writable(args.out / f"{name}.json")
    rates = [float(rate) for rate in args.rates.split(",")]
    console = Console(stderr=True)
    promised = ("--slo-ttft-ms", args.slo_ttft_ms, "--slo-itl-ms", args.slo_itl_ms)

    def load(url, name, rate, seed):
        config = LoadConfig(
            url=url,
            rates=(rate,),
            duration_s=args.duration,
            budgets=((labels[name][0], 1.0),),
            max_tokens=args.max_tokens,
            slo_ttft_ms=args.slo_ttft_ms,
            slo_itl_ms=args.slo_itl_ms,
            seed=seed,
        )
        return run_load(config)

    cases = [(r, name, rate) for r in range(args.repeats) for name in labels for rate in rates]
    random.Random(0).shuffle(cases)
    cases.sort(key=lambda case: case[0])
    found = {name: {"points": [], "requests": []} for name in labels}
    with ExitStack() as stack:
        options = (*promised, "--min-budget", 0.5, "--max-rows", args.max_rows)
        ours = stack.enter_context(served(args.model, *options))
        servers = dict.fromkeys(LABELS, ours)
        for name, command in commands.items():
            port = free_port()
            process = stack.enter_context(started(command(port), port, args.threads))
            servers[name] = (f"http://127.0.0.1:{port}", process)
        processes = list(dict.fromkeys(process for _, process in servers.values()))
        stack.callback(lambda: awake(ours[1], processes))  # it ends as it is asked to
        for name, (url, process) in servers.items():
            awake(process, processes)
            load(url, name, 1.0, 0)  # warms up
        for repeat, name, rate in track(cases, console=console, transient=True):
            url, process = servers[name]
            awake(process, processes)
            made = load(url, name, rate, repeat)
            (point,) = made["points"]
            found[name]["points"].append({"repeat": repeat, **point})
            for asked in made["requests"]:
                del asked["itls_ms"]  # the points have their percentiles
                found[name]["requests"].append({"repeat": repeat, **asked})
            console.print(
                f"{name:<10} {rate:5.1f}/s: {point['goodput_rps']:5.2f} good answers/s, "
                f"{point['blocks_per_token'] or 0:4.1f} blocks a token"
            )
    for name, (budget, label) in labels.items():
        found[name]["points"].sort(key=lambda point: (point["rate"], point["repeat"]))
        config = {**experiment.texts(args), "label": label, "budgets": [[budget, 1.0]]}
        config |= {"prompts": "built-in", "distinct_prompts": len(PROMPTS)}
        for place in ("vllm", "llama_server", "gguf"):
            config[place] = getattr(args, place) is not None
        experiment.save(args.out / f"{name}.json", "serving-load", found[name], config=config)


if __name__ == "__main__":
    experiment.run(main)
