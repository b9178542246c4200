"""What do plans of their own cost a server whose batch mixes kinds of prompts?

The same prompts, some of each kind, are asked at once for answers of one length at one depth, of
three servers in turn: all rows by one order (`one order`), rows grouped by the plan of their own
prompt (`grouped`), and one ranking for the rows of a step (`shared`). A ratio is taken within a
round. What plans of their own gain is in the record of `buddy route`.

    python benchmarks/mixed_kinds.py RECORD --rows validation.jsonl --out FILE

RECORD is that of the run, beside whose `checkpoint/` it lies.
"""

import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
from rich.progress import track
from served import served

from buddy.data.rows import read_rows
from buddy.lab import experiment
from buddy.records import read_record

CHAT = "/v1/chat/completions"


def prompts_by_kind(path, kinds):
    """The instructions of a file's rows, by kind."""
    found = {kind: [] for kind in kinds}
    for _, row in read_rows(path):
        if row.get("source") in found:
            text = row.get("instruction") or row["prompt"]
            found[row["source"]].append("\n\n".join(filter(None, (text, row.get("input")))))
    return found


async def ask_all(client, url, prompts, args):
    """Seconds until all answers are there, and the sets of blocks that they ran."""

    async def ask(prompt):
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        asked = {
            "max_tokens": args.new_tokens,
            "ignore_eos": True,
            "budget": f"{args.blocks} blocks",
        }
        answer = await client.post(f"{url}{CHAT}", json={**body, **asked})
        usage = answer.raise_for_status().json()["usage"]
        assert usage["completion_tokens"] == args.new_tokens
        assert usage["buddy"]["blocks_per_token"] == args.blocks

    begun = time.perf_counter()
    await asyncio.gather(*map(ask, prompts))
    return time.perf_counter() - begun


async def measure(urls, kinds, args):
    """Seconds of each way, by round."""
    draw, seconds = random.Random(args.seed), {way: [] for way in urls}
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        for number in track(range(args.rounds + 1), transient=True):
            prompts = [text for some in kinds.values() for text in draw.sample(some, args.each)]
            for way in draw.sample(list(urls), len(urls)):
                time.sleep(1)  # threads of the others wait for work by spinning
                taken = await ask_all(client, urls[way], prompts, args)
                if number:
                    seconds[way].append(taken)
    return seconds


def main():
    """Measure, print, record."""
    parser = experiment.arguments(__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=22)
    parser.add_argument("--each", type=int, default=2, help="prompts of each kind, asked at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = read_record(args.record)["results"]
    kinds = prompts_by_kind(args.rows, results["confirmed"])
    common = args.record.parent / "orders" / f"{results['common']}.json"
    model = args.record.parent / "checkpoint"
    ways = {
        "one order": ("--policy", f"static:{common}"),
        "grouped": ("--batch-route", "independent"),
        "shared": ("--batch-route", "shared"),
    }
    with ExitStack() as stack:
        urls = {
            way: stack.enter_context(served(model, *options))[0] for way, options in ways.items()
        }
        seconds = asyncio.run(measure(urls, kinds, args))
    rows = args.each * len(kinds)
    speeds = {
        way: {
            "tokens_per_s": rows * args.new_tokens / statistics.median(taken),
            "over_one_order": statistics.median(
                base / own for base, own in zip(seconds["one order"], taken, strict=True)
            ),
            "seconds": taken,
        }
        for way, taken in seconds.items()
    }
    for way, found in speeds.items():
        print(f"{way:10} {found['tokens_per_s']:7.1f} tokens/s  {found['over_one_order']:.3f}")
    experiment.save(args.out, "mixed-kinds", {"rows": rows, "ways": speeds}, config=args)


if __name__ == "__main__":
    experiment.run(main)
