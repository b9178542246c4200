r"""From how many rows on does torch make logits sooner than the kernel? Both in turn, by rows.

torch is held to the instructions that BUDDY_NATIVE names by its own variables, given beside it:

    python benchmarks/logits.py --out results/logits.json
    BUDDY_NATIVE=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        python benchmarks/logits.py --out results/logits-avx2.json
"""

import os
import time

import torch

from buddy.engine.executors.native import decoder
from buddy.inference import InferenceModel
from buddy.lab import experiment

ROWS = (32, 48, 64, 96, 128, 256)
HELD = ("BUDDY_NATIVE", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    decoder.MOST_LOGITS = max(ROWS)
    model = InferenceModel.load(args.model, engine="native")
    kernel = model.executor.fast_path()
    makers = {"kernel": kernel.logits, "torch": model.backbone.logits}
    width, dtype = model.config.hidden_size, model.dtype
    hidden = {rows: torch.randn(rows, width, dtype=dtype) for rows in ROWS}
    rounds = experiment.take_turns(
        list(makers), ROWS, args.rounds, lambda name, rows: timed(makers[name], hidden[rows])
    )
    points = [point(rows, taken) for rows, taken in rounds.items()]
    held = {name: os.environ[name] for name in HELD if name in os.environ}
    config = {**experiment.texts(args), "held_to": held, "threads": torch.get_num_threads()}
    results = {"points": points, "instructions": kernel.library.instructions}
    experiment.save(args.out, "logits", results, config=config, model=model.facts())
    print(table(points))


def point(rows, taken):
    """Medians, and that of the ratios within rounds."""
    times = {f"{name}_ms": experiment.median([each[name] for each in taken]) for name in taken[0]}
    ratio = experiment.median([each["torch"] / each["kernel"] for each in taken])
    return {"rows": rows, **times, "times_as_fast": ratio}


def table(points):
    """A row a number of rows."""
    head = ("rows", "kernel, ms", "torch, ms", "kernel, times as fast")
    keys = ("kernel_ms", "torch_ms", "times_as_fast")
    return experiment.markdown(head, [(p["rows"], *(f"{p[k]:.2f}" for k in keys)) for p in points])


@torch.no_grad()
def timed(make, hidden):
    """Milliseconds of one call."""
    begun = time.perf_counter()
    make(hidden)
    return 1000 * (time.perf_counter() - begun)


if __name__ == "__main__":
    experiment.run(main)
