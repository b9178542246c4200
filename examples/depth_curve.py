"""Loss and speed against depth, as a figure.

    python examples/depth_curve.py [--model MODEL] [--out depth.png]

Both are measured here, on a short text and one prompt, so they are a sketch: `buddy eval`, `buddy
bench` and `buddy plot` measure with records, repetitions and errors. Needs matplotlib, which the
extra `plots` brings.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from buddy import BuddyForCausalLM, DepthTrace, load_tokenizer

TEXT = """Sunlight is a mixture of all colours. On its way through the air it meets gas molecules,
which scatter short wavelengths such as blue far more strongly than long ones such as red."""


@torch.no_grad()
def main() -> None:
    """Measure at five depths and draw two lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-buddy")
    parser.add_argument("--out", type=Path, default=Path("depth.png"))
    options = parser.parse_args()

    model = BuddyForCausalLM.from_pretrained(options.model, merge_adapter=True)
    ids = load_tokenizer(options.model)(TEXT, return_tensors="pt")["input_ids"]
    blocks = sorted({round(share * model.num_blocks) for share in (0.5, 0.6, 0.75, 0.9, 1.0)})
    losses, speeds = [], []
    for count in blocks:
        budget, trace = f"{count} blocks", DepthTrace()
        losses.append(float(model(ids, labels=ids, budget=budget).loss))
        model.generate(ids, budget=budget, max_new_tokens=24, min_new_tokens=24, trace=trace)
        speeds.append(trace.decode_tokens_per_s)
        print(f"{budget:>9}  {losses[-1]:6.2f} nats a token  {speeds[-1]:6.0f} tokens/s")

    figure = Figure(figsize=(8, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(blocks, losses, marker="o")
    left.set(xlabel="blocks", ylabel="loss (nats a token)")
    right.plot(blocks, speeds, marker="o")
    right.set(xlabel="blocks", ylabel="tokens/s", ylim=(0, None))
    figure.suptitle(f"{Path(options.model).name} on {torch.get_num_threads()} threads")
    figure.savefig(options.out, dpi=150)
    print(options.out)


if __name__ == "__main__":
    main()
