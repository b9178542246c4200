"""Where the time of a pass goes: 5 prompts of 256 tokens, all blocks and half of them."""

from typing import Any, Final

from buddy.lab.paper.published.read import read_paper
from buddy.lab.paper.run import Run
from buddy.lab.paper.table import Collected, Sheet

BATCH: Final = 5
CONTEXT: Final = 256
_PIECES: Final = ("blocks", "router", "gather_scatter", "kv_fill", "head", "host")


def collect(run: Run) -> Collected:
    """One `buddy bench`, by the router and by plans that differ from row to row."""
    room = run.outline().config.max_position_embeddings
    context = min(CONTEXT, room - 16)
    policies = ["random:0"] if run.outline().router is None else ["routed", "random:0"]
    record = run.buddy(
        *("bench", "bench", "--model", run.request.model, "-b", "1.0", "-b", "0.5"),
        *(part for policy in policies for part in ("--policy", policy)),
        *("--batch", str(BATCH), "--tokens", str(context), "--max-new-tokens", "16"),
        *("--rounds", "11" if run.request.full else "3", "--no-transformers"),
        model=run.request.model,
    )
    cells = record["results"]["cells"]
    theirs = {row["piece"]: row for row in read_paper("breakdown")}
    return Collected(
        results={**record["results"], "paper": list(theirs.values())},
        sheets=(_sheet(cells, theirs),),
        facts=record["model"],
        settings={"batch": BATCH, "context": context},
        differs=""
        if context == CONTEXT
        else f"The model's context leaves room for {context} tokens.",
    )


def _sheet(cells: list[dict[str, Any]], theirs: dict[str, dict[str, str]]) -> Sheet:
    """A row a policy and phase, a column a piece; the paper's row last."""
    body = []
    for cell in cells:
        name = f"{cell['phase']}, {cell['blocks']} blocks, {cell['policy'].partition(':')[0]}"
        parts = [cell["latency_ms"] * cell["shares"][piece] for piece in _PIECES]
        body.append((name, *(f"{part:,.2f}" for part in parts), f"{cell['latency_ms']:,.1f}"))
    reported = [f"{float(theirs[p]['latency_ms']):.2f}" if p in theirs else "" for p in _PIECES]
    whole = float(theirs["blocks"]["latency_ms"]) / float(theirs["blocks"]["share"]) * 100
    body.append(("paper: Llama-2-7B, A100", *reported, f"{whole:.1f}"))
    names = tuple({"gather_scatter": "gather", "kv_fill": "KV fill"}.get(p, p) for p in _PIECES)
    title = "Latency by piece, ms; gather and scatter together"
    return Sheet.of(title, ("pass", *names, "all"), body)
