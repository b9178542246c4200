"""What does decoding cost in quality? Cross-entropy of answers that are fed a token at a time.

The prompt is prefilled, then the reference answer is decoded as `generate` would: with a new plan
at every step and the cache that skipped blocks leave behind. Conditions differ in one thing: the KV
policy, when to route again, whose scores rank the blocks of a batch, how many bits a weight has.

    python benchmarks/decode_quality.py -m smollm2-135m-buddy rows.jsonl --sources alpaca samsum \
        --blocks 22 15 --out results/decode-quality.json
"""

import itertools
import random
import statistics
import time

import torch
from rich.progress import track

from buddy import BuddyForCausalLM, load_tokenizer
from buddy.engine.state.cache import KV_POLICIES
from buddy.generation.padded import left_padded
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment
from buddy.training.answer_losses import Losses

BASE = {"kv_policy": "lazy", "reroute": "step", "batch_route": "independent"}
CONDITIONS = {
    "base": {},
    **{f"kv {policy}": {"kv_policy": policy} for policy in KV_POLICIES if policy != "lazy"},
    "reroute prefill": {"reroute": "prefill"},
    "prompt at full depth": {"prefill_budget": 1.0},
    "batch 8": {"batch": 8},
    "batch 8 shared": {"batch": 8, "batch_route": "shared"},
    "int8": {"quant": "int8"},
    "int4": {"quant": "int4"},
}


@torch.no_grad()
def losses_of(model, batch, blocks, kv_policy, reroute, batch_route, prefill_budget=None):
    """Nats of each row's answer, its distinct plans, and seconds of the prefill and of all."""
    prompts = [torch.tensor(example.prompt) for example in batch]
    ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True)
    ids, mask = left_padded(ids, mask)
    budget = [f"{blocks} blocks"] * len(batch)
    options = {"budget": budget, "reroute": reroute, "batch_route": batch_route}
    first = {"kv_policy": kv_policy, "use_cache": True, "logits_to_keep": 1}
    started_s = time.perf_counter()
    out = model(ids, mask, prefill_budget=prefill_budget, **first, **options)
    prefill_s = time.perf_counter() - started_s
    losses, plans = [[] for _ in batch], [set() for _ in batch]
    for step in range(max(len(example.answer) for example in batch)):
        logprobs = out.logits[:, -1].float().log_softmax(-1)
        # A row whose answer is over is fed its last token, and counts no more.
        tokens = [example.answer[min(step, len(example.answer) - 1)] for example in batch]
        for row, example in enumerate(batch):
            if step < len(example.answer):
                losses[row].append(-float(logprobs[row, tokens[row]]))
                plans[row].add(out.plan.executed_sets[row])
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        new = torch.tensor(tokens)[:, None]
        out = model(new, mask, cache=out.cache, **options)
    took = [prefill_s / len(batch)] * len(batch), [(time.perf_counter() - started_s) / len(batch)]
    return [sum(row) for row in losses], [len(row) for row in plans], *took


def measured(model, examples, blocks, batch=1, **options):
    """Over all rows; batches hold answers of similar length."""
    found = [], [], [], []
    for start in track(range(0, len(examples), batch), transient=True):
        made = losses_of(model, examples[start : start + batch], blocks, **{**BASE, **options})
        for own, more in zip(found, made, strict=True):
            own += more
    return found


def compared(nats, base, tokens):
    """Nats a token, what they are over the base with the paired error, and the mean of answers."""
    over, error = Losses(nats[:, None], tokens).behind(base)
    return {
        "nll": float(nats.sum() / tokens.sum()),
        "over_base": float(over),
        "over_base_stderr": float(error),
        "answers": len(tokens),
        "mean_of_answers": float((nats / tokens).mean()),
    }


def by_length(tokens, parts):
    """Answers, which come short ones first, in so many parts: first and last length, and which."""
    places = [len(tokens) * part // parts for part in range(parts + 1)]
    return [
        (int(tokens[first]), int(tokens[last - 1]), slice(first, last))
        for first, last in itertools.pairwise(places)
        if last - first > 1
    ]


def drawn(args):
    """Rows of each source, as many of one as of another; short answers first."""
    tokenizer = load_tokenizer(args.model)
    rows, draw = experiment.by_source(args.files, tokenizer, args.max_tokens), random.Random(0)
    found = []
    for name in sorted(rows.keys() & set(args.sources or rows)):
        found += draw.sample(rows[name], min(args.rows, len(rows[name])))
    return sorted(found, key=lambda example: len(example.answer))


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("files", nargs="+", help="instruction rows")
    parser.add_argument("-m", "--model", default=ROUTED_MODEL)
    parser.add_argument("--sources", nargs="*", help="of the rows that count; all if not given")
    parser.add_argument("--rows", type=int, default=32, help="of each source, at most")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--blocks", type=int, nargs="+", default=[22, 15])
    parser.add_argument("--conditions", nargs="*", choices=list(CONDITIONS), help="all if none")
    parser.add_argument("--lengths", type=int, default=3, help="parts by length of the answer")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    examples = drawn(args)
    conditions = {"base": {}, **{name: CONDITIONS[name] for name in args.conditions or CONDITIONS}}
    models = {
        quant: BuddyForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16, quant=quant, merge_adapter=True
        )
        for quant in {changes.get("quant") for changes in conditions.values()}
    }
    tokens = torch.tensor([len(example.answer) for example in examples], dtype=torch.float64)
    parts = by_length(tokens.tolist(), args.lengths)
    cells = []
    for blocks in args.blocks:
        base = None
        for name, changes in conditions.items():
            options = dict(changes)
            model = models[options.pop("quant", None)]
            found, plans, prefill_s, whole_s = measured(model, examples, blocks, **options)
            nats = torch.tensor(found, dtype=torch.float64)
            base = nats if base is None else base
            cells.append(
                {
                    "condition": name,
                    "blocks": blocks,
                    **compared(nats, base, tokens),
                    "by_length": [
                        {"from": first, "to": last, **compared(nats[own], base[own], tokens[own])}
                        for first, last, own in parts
                    ],
                    "plans_per_answer": statistics.mean(plans),
                    "prefill_s": statistics.mean(prefill_s),
                    "whole_s": statistics.mean(whole_s),
                }
            )
    experiment.show(
        f"cross-entropy of {len(examples)} answers, fed token by token",
        ("condition", "blocks", "nats a token", "over base", "plans an answer"),
        [
            (
                cell["condition"],
                cell["blocks"],
                f"{cell['nll']:.3f}",
                f"{cell['over_base']:+.3f}±{cell['over_base_stderr']:.3f}",
                f"{cell['plans_per_answer']:.1f}",
            )
            for cell in cells
        ],
    )
    experiment.save(
        args.out,
        "decode-quality",
        {"rows": len(examples), "cells": cells},
        config=experiment.values(args),
        model=models[None].facts(),
    )


if __name__ == "__main__":
    experiment.run(main)
