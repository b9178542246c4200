"""How long do a warm `buddy generate` of eight tokens and `buddy serve` take to start?

Three whole processes take turns: a Python that imports torch and does nothing else; `buddy
generate` on the default model, to its end; and `buddy serve` on it, until it answers.
Ratios are to `import torch` of the same round. Seconds of all cores are noted beside those of the
clock: on a machine that does other work they are what can be compared.

    python benchmarks/startup.py --out results/startup.json
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from buddy.lab import experiment

COMMANDS = {
    "import": [sys.executable, "-c", "import torch"],
    "generate": [sys.executable, "-m", "buddy", "generate", "Hello", "--max-new-tokens", "8"],
    "serve": [sys.executable, "-m", "buddy", "serve", "--port", "0"],
}


def wait_for_answer(url):
    """Ask for the list of models until there is one."""
    while True:
        try:
            with urllib.request.urlopen(f"{url}/v1/models"):
                return
        except urllib.error.URLError:
            time.sleep(0.01)


def run(name, _):
    """Seconds of the clock until a command is through, or ready, and seconds of all cores."""
    begun = time.perf_counter()
    with subprocess.Popen(
        COMMANDS[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        said = b""
        while line := process.stderr.readline():
            said += line
            if name == "serve" and line.startswith(b"keys:"):  # the last line before it answers
                wait_for_answer(re.search(rb"address: (\S+)", said)[1].decode())
                ready_s = time.perf_counter() - begun
                process.send_signal(signal.SIGTERM)
        _, status, used = os.wait4(process.pid, 0)
        ended_s = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{name} failed: {said.decode()}")
    wall_s = ready_s if name == "serve" else ended_s
    return {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime}


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    (rounds,) = experiment.take_turns(list(COMMANDS), [None], args.rounds, run).values()
    results = {}
    for name in COMMANDS:
        for clock in ("wall", "cpu"):
            times = [each[name][f"{clock}_s"] for each in rounds]
            results[f"{name}_{clock}_s"] = experiment.median(times)
            if name == "import":
                continue
            ratios = [each[name][f"{clock}_s"] / each["import"][f"{clock}_s"] for each in rounds]
            results[f"{name}_{clock}_ratio"] = experiment.median(ratios)
            results[f"{name}_{clock}_ratio_by_round"] = ratios
            print(
                f"{name}: {results[f'{name}_{clock}_ratio']:.2f} times import torch by {clock} "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
    config = {"rounds": args.rounds, "new_tokens": 8}
    experiment.save(args.out, "startup", results, config=config)


if __name__ == "__main__":
    experiment.run(main)
