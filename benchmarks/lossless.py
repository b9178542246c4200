"""Does drafting at a low budget pay? Time of full-depth text with drafts over without, by prompt.

Both are greedy, on the same weights, interleaved prompt by prompt; the texts are compared token for
token, and a difference is counted.

    python benchmarks/lossless.py data/alpaca/train.jsonl --out results/lossless.json
"""

import time

import torch
from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_examples
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment


def timed(model, ids, new_tokens, **options):
    """Seconds, and the text."""
    start = time.perf_counter()
    tokens = experiment.generate(model, ids, new_tokens, **options)
    return time.perf_counter() - start, tokens[0, ids.shape[1] :].tolist()


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("file", help="instruction rows; the last ones are taken")
    parser.add_argument("-m", "--model", default=ROUTED_MODEL)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft", type=int, nargs="+", default=[15, 18, 22])
    args = parser.parse_args()
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, merge_adapter=True)
    tokenizer = load_tokenizer(args.model)
    rows = read_examples(Source(path=args.file), tokenizer, max_tokens=512)[-args.prompts :]
    ratios, equal = {draft: [] for draft in args.draft}, dict.fromkeys(args.draft, 0)
    for number, row in enumerate(track([rows[0], *rows], transient=True)):
        ids = torch.tensor([row.prompt])
        plain_s, plain = timed(model, ids, args.new_tokens)
        for draft in args.draft:
            drafted_s, drafted = timed(model, ids, args.new_tokens, draft_budget=f"{draft} blocks")
            if number:  # the first warms up
                ratios[draft].append(plain_s / drafted_s)
                equal[draft] += plain == drafted
    cells = [
        {
            "draft_blocks": draft,
            "speedup": experiment.median(speedups),
            "least": min(speedups),
            "most": max(speedups),
            "same_text": equal[draft],
        }
        for draft, speedups in ratios.items()
    ]
    experiment.show(
        f"{args.prompts} prompts, {args.new_tokens} new tokens, end to end",
        ("blocks drafted at", "speed-up, median", "least", "most", "same text"),
        [
            (
                cell["draft_blocks"],
                *(f"{cell[name]:.2f}" for name in ("speedup", "least", "most")),
                f"{cell['same_text']} of {args.prompts}",
            )
            for cell in cells
        ],
    )
    config = experiment.values(args)
    experiment.save(args.out, "lossless", {"cells": cells}, config=config, model=model.facts())


if __name__ == "__main__":
    experiment.run(main)
