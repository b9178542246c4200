"""What a person sees on stderr: progress, the closing summary, depth strips."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from buddy.depth.budget import AUTO
from buddy.errors import PromptError
from buddy.hub.progress import Progress as OnProgress

if TYPE_CHECKING:
    from buddy.generation.trace import DepthTrace

_STAGES = {
    "wait": "Waiting for another process",
    "download": "Downloading weights",
    "verify": "Checking weights",
    "extract": "Unpacking weights",
    "convert": "Converting to safetensors",
    "measure": "Measuring an order of the blocks",
}


def stderr() -> Console:
    """The console for everything but the answer."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


@contextmanager
def fetch_progress(console: Console) -> Iterator[OnProgress]:
    """A progress bar that appears with the first news of a fetch, and goes when it is done."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=console,
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def on_progress(stage: str, done: int, total: int | None) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            tasks[stage] = bar.add_task(_STAGES.get(stage, stage), total=total, amount="")
        amount = "" if stage in ("convert", "measure", "wait") else f"{done / 1e6:.0f} MB"
        bar.update(tasks[stage], completed=done, total=total, amount=amount)

    try:
        yield on_progress
    finally:
        if tasks:
            bar.stop()


def read_prompt() -> str:
    """All of stdin, but for the newline that ends it.

    Raises:
        PromptError: It is not UTF-8.
    """
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt on stdin is no UTF-8 text: {error}") from error


def depth_strip(blocks: tuple[int, ...], num_blocks: int) -> Text:
    """One character a block: a bar where it ran, a dot where it was skipped."""
    ran = set(blocks)
    strip = Text()
    for block in range(num_blocks):
        strip.append(
            "█" if block in ran else "·", style="green" if block in ran else "bright_black"
        )
    return strip


def show_depth(console: Console, tokens: list[str], trace: "DepthTrace") -> None:
    """For every generated token, which blocks ran to make it."""
    for text, step in zip(tokens, trace.steps, strict=False):
        plan = step.plans[0]
        line = depth_strip(plan, trace.num_blocks)
        line.append(f" {len(plan):>3}  ", style="bright_black")
        line.append(repr(text)[1:-1])
        console.print(line)


def show_summary(
    console: Console,
    trace: "DepthTrace",
    *,
    budget: str | None,
    prefill_budget: str | None = None,
    policy: str,
    kv_policy: str,
) -> None:
    """Two closing lines: what was asked and run, and how fast."""
    asked = "full depth" if budget is None else f"budget {budget}"
    if budget is not None and budget.strip().lower() == AUTO:
        asked = f"auto: {trace.steps[0].executed[0]} of {trace.num_blocks} blocks"
    if prefill_budget is not None:
        prompt = f"{trace.steps[0].executed[0]} blocks in the prompt"
        asked += f" · prefill {prefill_budget}: {prompt}, {trace.decode_blocks_per_token:.4g} after"
    plans = f"{trace.distinct_plans} distinct plan{'s' if trace.distinct_plans != 1 else ''}"
    run = f"{trace.blocks_per_token:.4g} of {trace.num_blocks} blocks per token"
    decode = trace.decode_tokens_per_s
    speed = f"prefill {trace.prefill_tokens_per_s or 0:,.0f} tokens/s"
    if decode is not None:
        speed += f" · decode {decode:,.1f} tokens/s"
    console.print(f"{asked} · {run} · {plans} · {policy} · kv {kv_policy}", style="dim")
    console.print(f"{speed} · {len(trace.steps)} new tokens", style="dim")
