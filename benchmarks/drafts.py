"""Do drafts pay? Decode speed with drafts over without, of summaries, code edits and chat.

Summaries are of SAMSum's dialogues, edits rename a variable in functions of Python's own library,
chat asks MT-bench's first turns. Answers are greedy and end where they end. With and without drafts
take turns at each prompt, and a ratio is of the two at one prompt; texts are compared token for
token. Full speed needs an idle machine.

    python benchmarks/drafts.py ../shared/data --out results/drafts.json
"""

import importlib
import inspect
import json
import time
from collections import Counter
from pathlib import Path

import torch

from buddy import BuddyForCausalLM, DepthTrace, load_tokenizer
from buddy.data.chat import apply_chat
from buddy.generation.options import end_at_turns
from buddy.hub.presets import ROUTED_MODEL
from buddy.lab import experiment

MODULES = ("textwrap", "shlex", "fnmatch", "posixpath", "difflib", "statistics", "heapq", "bisect")
LINES = range(8, 40)
"""Of a function that is edited."""
CHAT = ("writing", "roleplay", "humanities", "stem")
"""Categories whose answers copy nothing."""


def summaries(data):
    """Requests for a summary."""
    for line in (data / "samsum/validation.jsonl").read_text().splitlines():
        yield f"Summarize this dialogue:\n\n{json.loads(line)['dialogue']}"


def edits(_):
    """Requests to rename a variable and to write the function again."""
    for name in MODULES:
        module = importlib.import_module(name)
        for function in vars(module).values():
            code = getattr(function, "__code__", None)
            if code is None or code.co_filename != module.__file__:
                continue
            source = inspect.getsource(function)
            own = [local for local in code.co_varnames[code.co_argcount :] if len(local) > 2]
            if own and len(source.splitlines()) in LINES:
                yield (
                    f"Rename the variable `{own[0]}` to `{own[0]}_value` in this function. Change "
                    f"nothing else, and write the whole function.\n\n```python\n{source}```"
                )


def chat(data):
    """First turns of conversations."""
    for line in (data / "mt_bench/questions.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["category"] in CHAT:
            yield row["turns"][0]


WORKLOADS = {"summaries": summaries, "edits": edits, "chat": chat}


def batches(prompts, tokenizer, size, count, longest):
    """Padded prompts, so many at a time."""
    rows = [
        apply_chat(tokenizer, [{"role": "user", "content": prompt}])["input_ids"]
        for prompt in prompts
    ]
    rows = [row for row in rows if len(row) <= longest][: size * count]
    for at in range(0, len(rows) - size + 1, size):
        width = max(map(len, rows[at : at + size]))
        ids, mask = torch.zeros(2, size, width, dtype=torch.long)
        for place, row in enumerate(rows[at : at + size]):
            ids[place, width - len(row) :] = torch.tensor(row)
            mask[place, width - len(row) :] = 1
        yield ids, mask


def timed(model, ids, mask, **options):
    """Seconds after the prompt was fed, and the texts."""
    trace = DepthTrace()
    out = model.generate(ids, attention_mask=mask, do_sample=False, trace=trace, **options)
    ended_s = time.perf_counter() if len(trace.steps) < 2 else trace.steps[-1].ended_s
    return ended_s - trace.steps[0].ended_s, out[:, ids.shape[1] :].tolist()


def cell(model, cases, args, size, budget):
    """What each kind of drafts gives over none: medians over prompts."""
    kinds = [kind for kind in args.drafts if size == 1 or kind == "ngram"]
    options = {"max_new_tokens": args.new_tokens, "budget": budget}

    def measure(kind, case):
        drafts = None if kind == "plain" else kind
        return timed(model, *cases[case], drafts=drafts, **options)

    seen = experiment.take_turns(["plain", *kinds], range(len(cases)), args.rounds, measure)
    for kind in kinds:
        ratios, same, tokens, seconds = [], 0, 0, Counter()
        for rounds in seen.values():
            ratios += [turn["plain"][0] / turn[kind][0] for turn in rounds]
            same += all(turn["plain"][1] == turn[kind][1] for turn in rounds)
            for turn in rounds:
                tokens += sum(map(len, turn["plain"][1]))
                seconds.update({name: turn[name][0] for name in ("plain", kind)})
        yield {
            "batch": size,
            "budget": budget,
            "drafts": kind,
            "speedup": experiment.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "speedup_of_all": seconds["plain"] / seconds[kind],
            "plain_tokens_per_s": tokens / seconds["plain"],
            "same_text": same,
            "prompts": len(cases),
        }


def main():
    """Measure, show, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("data", help="folder with samsum and mt_bench")
    parser.add_argument("-m", "--model", default=ROUTED_MODEL)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS], choices=WORKLOADS)
    parser.add_argument("--drafts", nargs="+", default=["ngram"], help="others at batch 1 alone")
    parser.add_argument("--budgets", nargs="+", default=["100%", "50%"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompts", type=int, default=16, help="at batch 1; fewer batches of more")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    merge = {"merge_adapter": True} if args.model == ROUTED_MODEL else {}
    model = BuddyForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, **merge)
    tokenizer = load_tokenizer(args.model)
    end_at_turns(model, tokenizer)
    cells = []
    for workload in args.workloads:
        for size in args.batches:
            prompts = WORKLOADS[workload](Path(args.data))
            count = max(2, args.prompts // size)
            cases = list(batches(prompts, tokenizer, size, count, args.longest))
            for budget in args.budgets:
                for found in cell(model, cases, args, size, budget):
                    cells.append({"workload": workload, **found})
    experiment.show(
        f"decode speed with drafts over without, {model.executor.describe()}",
        ("what, batch, budget, drafts", "median", "least", "most", "of all", "same text"),
        [
            (
                f"{found['workload']}, {found['batch']}, {found['budget']}, {found['drafts']}",
                *(f"{found[name]:.2f}" for name in ("speedup", "least", "most", "speedup_of_all")),
                f"{found['same_text']} of {found['prompts']}",
            )
            for found in cells
        ],
    )
    config = experiment.values(args)
    experiment.save(args.out, "drafts", {"cells": cells}, config=config, model=model.facts())


if __name__ == "__main__":
    experiment.run(main)
