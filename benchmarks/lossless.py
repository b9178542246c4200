"""Does drafting at a low budget pay? Time of full-depth text with drafts over without, by prompt.

Both are greedy, on the same weights, interleaved prompt by prompt; the texts are compared token for
token, and a difference is counted.

    python benchmarks/lossless.py data/alpaca/train.jsonl --out results/lossless.json
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.data.examples import Source, read_examples
from buddy.hub.presets import ROUTED_MODEL
from buddy.records import RunRecord


def timed(model, ids, new_tokens, **options):
    """Seconds, and the text."""
    start = time.perf_counter()
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    return time.perf_counter() - start, tokens[0, ids.shape[1] :].tolist()


def main():
    """Measure, show, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="instruction rows; the last ones are taken")
    parser.add_argument("-m", "--model", default=ROUTED_MODEL)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft", type=int, nargs="+", default=[15, 18, 22])
    parser.add_argument("--out", type=Path, required=True)
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
    table = Table(title=f"{args.prompts} prompts, {args.new_tokens} new tokens, end to end")
    for name in ("blocks drafted at", "speed-up, median", "least", "most", "same text"):
        table.add_column(name, justify="right")
    cells = []
    for draft, made in ratios.items():
        cells.append(
            {
                "draft_blocks": draft,
                "speedup": statistics.median(made),
                "least": min(made),
                "most": max(made),
                "same_text": equal[draft],
            }
        )
        spread = (f"{value:.2f}" for value in (statistics.median(made), min(made), max(made)))
        table.add_row(str(draft), *spread, f"{equal[draft]} of {len(made)}")
    Console(stderr=True).print(table)
    RunRecord(
        kind="lossless",
        model=model.facts(),
        config={key: value for key, value in vars(args).items() if key != "out"},
        results={"cells": cells},
    ).save(args.out)


if __name__ == "__main__":
    main()
