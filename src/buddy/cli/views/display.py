"""What a person sees on stderr: progress, the closing summary, depth strips."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import TaskID
from rich.text import Text

from buddy.budget.request import BudgetRequest
from buddy.cli.views.bars import Bars
from buddy.hub.progress import OnFetch

if TYPE_CHECKING:
    from buddy.engine.executors.choice import ExecutorChoice
    from buddy.generation.trace import DepthTrace
    from buddy.routing.measured_constant import MeasuredConstant

_STAGES = {
    "wait": "Waiting for another process",
    "download": "Downloading weights",
    "verify": "Checking weights",
    "extract": "Unpacking weights",
    "convert": "Converting to safetensors",
    "measure": "Measuring an order of the blocks",
    "export": "Writing weights",
}

_UNLIMITED: Final = 100_000
"""Columns of a file or a pipe, in which nothing is wrapped."""


class _Console(Console):
    """A console that prints text as it is, and leaves a reader that has gone to `main`."""

    def on_broken_pipe(self) -> None:
        raise  # called by rich where BrokenPipeError is handled


def _console(file: Any) -> Console:
    console = _Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _UNLIMITED
    return console


def stdout() -> Console:
    """The console for what was asked for."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console for everything else."""
    return _console(sys.stderr)


@contextmanager
def fetch_progress(console: Console) -> Iterator[OnFetch]:
    """A progress bar that appears with the first news of a fetch, and goes when it is done."""
    bars = Bars(console, counts=False)
    tasks: dict[str, TaskID] = {}

    def on_progress(stage: str, done: int, total: int | None) -> None:
        if not tasks:
            bars.start()
        if stage not in tasks:
            tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total)
        news = f"{done / 1e6:.0f} MB" if stage not in ("convert", "measure", "wait") else ""
        bars.update(tasks[stage], completed=done, total=total, news=news)

    try:
        yield on_progress
    finally:
        if tasks:
            bars.stop()


def prepare_engine(console: Console, executor: "ExecutorChoice") -> None:
    """Have ready what decodes before anything is timed; say so where it had to be compiled.

    Raises:
        ModelError: The engine that was asked for cannot be had.
    """
    with console.status("Preparing the engine"):
        library = executor.library
    if library is None or library.compile_s is None:
        return
    how_often = "once for this machine"
    if library.why_not_kept is not None:
        how_often = (
            f"and it cannot be kept ({library.why_not_kept}): have BUDDY_HOME name a folder that "
            "can be written"
        )
    console.print(
        f"compiled the native engine in {library.compile_s:.0f} s, {how_often}",
        style="dim",
        markup=False,
    )


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
    """Print the blocks that ran for every generated token."""
    for text, step in zip(tokens, trace.steps, strict=False):
        plan = step.plans[0]
        line = depth_strip(plan, trace.num_blocks)
        line.append(f" {len(plan):>3}  ", style="bright_black")
        line.append(repr(text)[1:-1])
        console.print(line)


def show_footer(
    console: Console, trace: "DepthTrace", budget: BudgetRequest | None, *, is_stopped: bool
) -> None:
    """One line after a turn of a conversation; no more of it than fits the terminal."""
    parts = [
        _asked(budget, trace),
        f"{trace.blocks_per_token:.4g} of {trace.num_blocks} blocks",
        f"{len(trace.steps)} token{'s' if len(trace.steps) != 1 else ''}",
    ]
    if trace.decode_tokens_per_s is not None:
        parts.insert(2, f"{trace.decode_tokens_per_s:,.1f} tokens/s")
    if is_stopped:
        parts.append("stopped")
    elif "context" in trace.finish_reasons:
        parts.append(f"context of {trace.context:,} is full")
    console.print(" · ".join(parts), style="dim", no_wrap=True, overflow="ellipsis")


def _asked(budget: BudgetRequest | None, trace: "DepthTrace") -> str:
    if budget is not None and budget.is_auto:
        return f"auto: {trace.steps[0].executed[0]} of {trace.num_blocks} blocks"
    return f"budget {budget.text}" if budget is not None and budget.text else "full depth"


def show_summary(
    console: Console,
    trace: "DepthTrace",
    *,
    budget: BudgetRequest | None,
    prefill_budget: BudgetRequest | None = None,
    constant: "MeasuredConstant | None",
    policy: str,
    kv_policy: str,
    engine: str,
) -> None:
    """Two closing lines: what was asked and run, and how fast."""
    asked = _asked(budget, trace)
    if budget is not None and budget.is_auto and constant is not None:
        asked += constant.note
    if prefill_budget is not None:
        prompt = f"{trace.steps[0].executed[0]} blocks in the prompt"
        asked += (
            f" · prefill {prefill_budget.text}: {prompt}, {trace.decode_blocks_per_token:.4g} after"
        )
    plans = f"{trace.distinct_plans} distinct plan{'s' if trace.distinct_plans != 1 else ''}"
    run = f"{trace.blocks_per_token:.4g} of {trace.num_blocks} blocks per token"
    if prefill_budget is not None:
        run += " in all"
    decode = trace.decode_tokens_per_s
    speed = f"prefill {trace.prefill_tokens_per_s or 0:,.0f} tokens/s"
    if decode is not None:
        speed += f" · decode {decode:,.1f} tokens/s"
    console.print(f"{asked} · {run} · {plans} · {policy} · kv {kv_policy}", style="dim")
    speed += f" · {len(trace.steps)} new tokens"
    if "context" in trace.finish_reasons:
        speed += f" · stopped: the context of {trace.context:,} tokens is full"
    console.print(f"{speed} · {engine}", style="dim", markup=False)
