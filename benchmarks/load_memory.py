"""What memory does loading a model take, and how much of it stays, by the format of its weights?

The model is loaded in a process of its own, in bfloat16 and with each `--quant`. Resident memory
is what the kernel says of that process: at its peak, and when all is loaded. What a process has
that has only imported the same modules is told apart. A GGUF file is converted first, and what
that takes stands in the record too.

    python benchmarks/load_memory.py -m smollm2-135m-buddy --out results/load-memory.json
"""

import contextlib
import gc
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

from buddy.checkpoint.resolve import resolve
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment
from buddy.records import read_record

PLAIN = "bfloat16"
MIB = 2**20


def resident(name):
    """Bytes of this process: "VmRSS" for now, "VmHWM" for the most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def load(name, numbers):
    """Load a model; what is resident then, and the modules that are imported."""
    import torch

    from buddy import BuddyForCausalLM

    quant = None if numbers == PLAIN else numbers
    options = {"dtype": torch.bfloat16, "device": "cpu", "merge_adapter": True, "quant": quant}
    started_s = time.perf_counter()
    model = BuddyForCausalLM.from_pretrained(name, **options)
    took_s = time.perf_counter() - started_s
    gc.collect()
    now, peak = resident("VmRSS"), resident("VmHWM")
    tensors = {t.data_ptr(): t.nbytes for t in (*model.model.parameters(), *model.model.buffers())}
    found = {"resident_bytes": now, "peak_bytes": peak, "weights_bytes": sum(tensors.values())}
    found["seconds"] = round(took_s, 1)
    return {"found": found, "facts": model.facts(), "modules": sorted(sys.modules)}


def empty():
    """Import the modules that stdin names and load nothing; what is resident then."""
    for name in json.load(sys.stdin):
        with contextlib.suppress(Exception):  # some are made by others, not imported
            importlib.import_module(name)
    return resident("VmRSS")


def convert(name):
    """Convert a GGUF file; the peak of it, and seconds of processor and clock."""
    started_s = time.perf_counter()
    resolve(name).base.folder()
    took = {"seconds": time.perf_counter() - started_s, "processor_seconds": time.process_time()}
    found = {key: round(value, 1) for key, value in took.items()}
    return {"peak_bytes": resident("VmHWM"), "file_bytes": Path(name).stat().st_size, **found}


def alone(*work, given=None, cache=None):
    """What a process of its own gives of some work, by name and arguments; it is given JSON."""
    command, text = [sys.executable, __file__, *work], json.dumps(given)
    env = os.environ if cache is None else {**os.environ, "XDG_CACHE_HOME": cache}
    done = subprocess.run(
        command, input=text, text=True, check=True, stdout=subprocess.PIPE, env=env
    )
    return json.loads(done.stdout)


def measure(name):
    """All formats of a model, beside an empty process."""
    from buddy.backbone.quantised import Quantisation

    found, formats, modules, facts = {}, {}, set(), {}
    if name.endswith(".gguf"):
        with tempfile.TemporaryDirectory() as cache:
            found["conversion"] = alone("convert", name, cache=cache)
    resolve(name).base.folder()  # fetched or converted
    for numbers in (PLAIN, *get_args(Quantisation)):
        made = alone("load", name, numbers)
        formats[numbers], facts = made["found"], made["facts"]
        modules |= set(made["modules"])
    found |= {"empty_bytes": alone("empty", given=sorted(modules)), "formats": formats}
    return found, facts


def memory_table(path):
    """What stays and the peak, in MiB and as shares, as Markdown."""
    found, rows = read_record(path)["results"], []
    nothing, plain = found["empty_bytes"], found["formats"][PLAIN]["resident_bytes"]
    for numbers, taken in found["formats"].items():
        stays, peak = (taken[f"{name}_bytes"] - nothing for name in ("resident", "peak"))
        rows.append(
            (
                numbers,
                *(f"{n / MIB:,.0f}" for n in (taken["weights_bytes"], stays, peak)),
                f"{stays / (plain - nothing):.2f}",
                f"{taken['resident_bytes'] / plain:.2f}",
                f"{peak / stays:.2f}",
            )
        )
    shares = ("stays / bfloat16", "with the empty process", "peak / stays")
    head = ("in MiB", "weights", "stays", "peak", *shares)
    return experiment.markdown(head, rows)


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("-m", "--model", default=ROUTED_MODEL)
    args = parser.parse_args()
    results, facts = measure(args.model)
    config = experiment.values(args)
    experiment.save(args.out, "load-memory", results, config=config, model=facts)
    print(memory_table(args.out))


if __name__ == "__main__":
    parts = {"load": load, "empty": empty, "convert": convert}
    if sys.argv[1:2] and sys.argv[1] in parts:
        print(json.dumps(parts[sys.argv[1]](*sys.argv[2:])))
    else:
        experiment.run(main)
