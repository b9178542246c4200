"""What does serving take beside weights and cache? Peak memory of one process that generates.

Resident memory is read from the kernel before the model is loaded and at its peak, so what Python
and torch take alone is left out.

    python benchmarks/memory.py --out results/memory.json
"""

import resource

import torch
from rich.console import Console

from buddy import BuddyForCausalLM
from buddy.hub.presets import DEFAULT_MODEL
from buddy.lab import experiment


def peak_bytes():
    """The most that was resident so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@torch.no_grad()
def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("-m", "--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=15)
    args = parser.parse_args()
    _ = torch.randn(256, 256, dtype=torch.bfloat16) @ torch.randn(256, 256, dtype=torch.bfloat16)
    before = peak_bytes()
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    loaded = peak_bytes()
    ids = torch.randint(model.config.vocab_size, (1, args.context))
    budget = f"{args.blocks} blocks"
    out = model(ids, budget=budget, logits_to_keep=1)
    prefilled = peak_bytes()
    for _ in range(args.new_tokens):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, budget=budget, cache=out.cache)
    tensors = {p.data_ptr(): p.nbytes for p in model.model.parameters()}
    needed = sum(tensors.values()) + out.cache.kv.num_bytes()
    results = {
        "weights_and_cache_bytes": needed,
        "loaded_bytes": loaded - before,
        "prefilled_bytes": prefilled - before,
        "peak_bytes": peak_bytes() - before,
        "peak_over_needed": (peak_bytes() - before) / needed,
        "engine": model.executor.name,
    }
    for name, value in results.items():
        Console(stderr=True).print(f"{name}: {value}")
    config = experiment.values(args)
    experiment.save(args.out, "memory", results, config=config, model=model.facts())


if __name__ == "__main__":
    experiment.run(main)
