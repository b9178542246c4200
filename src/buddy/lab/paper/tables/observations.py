"""A block's importance, ranked by each input alone, and by more and more of its context."""

import statistics
from typing import Any

from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

_TEXTS = ("wikitext2", "ptb")


def collect(run: Run) -> Collected:
    """Both of `buddy observe`, on the base model."""
    base, full = run.base(), run.request.full
    inputs = str(run.rows(48, 48) if full else run.rows(12, 48))
    tokens, first, last, every = (256, 256, 512, 32) if full else (128, 64, 192, 32)
    texts = [part for text in _TEXTS for part in ("--text", text)]
    common = (*run.data(), "--limit", inputs)
    ranks = run.buddy(
        *("ranks", "observe", "ranks", base, *texts, *common, "--tokens", str(tokens)), model=base
    )
    context = run.buddy(
        *("context", "observe", "context", base, *common),
        *("--from", str(first), "--to", str(last), "--every", str(every)),
        model=base,
    )
    return Collected(
        results={**context["results"], **ranks["results"]},
        sheets=(_by_input(ranks["results"]), _by_context(context["results"])),
        facts=ranks["model"],
        settings={"inputs": int(inputs), "tokens": tokens, "contexts": [first, last, every]},
    )


def _by_input(results: dict[str, Any]) -> Sheet:
    """How far a block's rank moves from input to input, by text."""
    body = []
    for series in results["series"]:
        by_block = list(zip(*series["ranks"], strict=True))
        spans = [max(ranks) - min(ranks) for ranks in by_block]
        widest = max(range(len(spans)), key=spans.__getitem__)
        body.append(
            (
                series["text"],
                series["indicator"],
                len(series["ranks"]),
                f"{statistics.fmean(spans):.1f}",
                f"{statistics.fmean(statistics.pstdev(ranks) for ranks in by_block):.2f}",
                f"{spans[widest]:.0f} (block {widest})",
            )
        )
    columns = ("text", "indicator", "inputs", "mean span of ranks", "mean deviation", "widest")
    return Sheet.of("Ranks of blocks by input", columns, body)


def _by_context(results: dict[str, Any]) -> Sheet:
    """The blocks whose rank moves furthest from the shortest context to the longest."""
    first, last = results["ranks"][0], results["ranks"][-1]
    moved = sorted(range(len(first)), key=lambda block: -abs(last[block] - first[block]))
    contexts = results["contexts"]
    body = [
        (block, f"{a:.1f}", f"{b:.1f}", f"{b - a:+.1f}")
        for block, a, b in ((block, first[block], last[block]) for block in moved[:6])
    ]
    columns = ("block", f"{contexts[0]} tokens", f"{contexts[-1]} tokens", "moved")
    return Sheet.of("Mean rank by context, most moved", columns, body)
