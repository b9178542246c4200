"""Perplexity over sliding windows, each routed from the tokens before those it scores."""

import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from buddy.engine.feed import Feed
from buddy.engine.run import run_once
from buddy.errors import DataError
from buddy.lab.evaluation.conditions import Condition
from buddy.lab.evaluation.execution import execution_rates
from buddy.lab.evaluation.samples import SampleLog, mean_and_error, measure_missing
from buddy.lab.evaluation.tasks.scoring import token_logprobs
from buddy.model import BuddyForCausalLM

OnWindows = Callable[[Condition, int], None]
"""Called as `on_windows(condition, windows that are done more)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """A batch of windows, as it is logged."""

    task: str
    """Name of the text."""
    nll: tuple[float, ...]
    """Each window's sum over its scored tokens."""
    blocks: tuple[tuple[int, ...], ...]
    """The plan of each window's last token."""
    depths: tuple[float, ...] = ()
    """Blocks that a token ran on average, by window; none in an older log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedText:
    """A text in windows, and which tokens of each are scored."""

    name: str
    """What figures call it: their task."""
    ids: Int[Tensor, "windows tokens"]
    """Windows, as `sliding_windows` gives them."""
    stride: int
    """Tokens to score, at the end of each window."""
    leaks: bool = False
    """Whether the route sees the scored tokens too."""


class WindowLoss(NamedTuple):
    """What a window costs."""

    nll: float
    """Summed over its scored tokens."""
    blocks: tuple[int, ...]
    """The plan of its last token."""
    depth: float
    """Blocks that a token ran, over all its tokens."""


def sliding_windows(
    token_ids: Sequence[int],
    *,
    window: int,
    stride: int,
    limit: int | None = None,
    begin: Sequence[int] = (),
) -> Int[Tensor, "windows tokens"]:
    """Windows that overlap by `window - stride` tokens; a rest that fills none is left out.

    Of each window the last `stride` tokens are scored, so every token but the first
    `window - stride` is scored once, with at least that many before it.

    Args:
        token_ids: Of the text alone.
        window: Tokens of each.
        stride: From one to the next.
        limit: At most this many; None = all.
        begin: What each window begins with, in the place of as many tokens of the text.

    Raises:
        DataError: The text does not fill one window, or the stride does not fit the window.
    """
    check_windows(window, stride)
    width = window - len(begin)
    if len(token_ids) < width:
        raise DataError(
            f"the text has {len(token_ids)} tokens, less than one window of {window}: give more "
            "text or shorter windows"
        )
    ids = torch.tensor(token_ids).unfold(0, width, stride)[:limit]
    return torch.cat([torch.tensor(begin, dtype=ids.dtype).expand(len(ids), -1), ids], dim=1)


def check_windows(window: int, stride: int) -> None:
    """Refuse a stride that does not fit the window.

    Raises:
        DataError: It does not leave a token before those that are scored.
    """
    if not 1 <= stride < window:
        raise DataError(
            f"stride must be from 1 to {window - 1} for windows of {window} tokens, got {stride}"
        )


@torch.inference_mode()
def window_losses(
    model: BuddyForCausalLM,
    condition: Condition,
    ids: Int[Tensor, "windows tokens"],
    *,
    stride: int,
    leaks: bool = False,
) -> list[WindowLoss]:
    """The negative log-likelihood of each window, over its scored tokens, and what ran.

    Args:
        model: Runs the blocks.
        condition: Chooses them, and how many.
        ids: Windows of equal length.
        stride: Tokens to score, at the end of each.
        leaks: Let the route see the scored tokens too.
    """
    ids = ids.to(model.device)
    windows, width = ids.shape
    router_sees = torch.ones_like(ids, dtype=torch.bool)
    if not leaks:
        router_sees[:, width - stride :] = False
    feed = Feed.of_batch(ids, router_sees=router_sees)
    out = run_once(
        model.backbone,
        condition.policy,
        feed,
        [condition.budgets(width - stride, row[width - stride :]) for row in ids.tolist()],
    )
    hidden = out.hidden.view(windows, width, -1)
    before = hidden[:, width - stride - 1 : -1].flatten(0, 1)
    logprobs, _ = token_logprobs(model, before, ids[:, width - stride :].flatten())
    sums = (-logprobs.cpu().double().view(windows, stride).sum(1)).tolist()
    depths = out.executed.cpu().view(windows, width).double().mean(1).tolist()
    return list(map(WindowLoss, sums, out.last_plan.executed_sets, depths))


def run_perplexity(
    model: BuddyForCausalLM,
    conditions: Sequence[Condition],
    text: WindowedText,
    *,
    batch: int = 4,
    log: SampleLog | None = None,
    on_windows: OnWindows = lambda condition, windows: None,
) -> dict[str, Any]:
    """Perplexity of every condition over all windows.

    Args:
        model: Runs the blocks.
        conditions: One after another.
        text: In windows.
        batch: Windows at a time.
        log: Keeps each window's loss, and gives back those it has.
        on_windows: Told of each batch done.

    Returns:
        `points` and `execution`. A perplexity's standard error is that of the windows' mean loss,
        times the perplexity; windows are neighbours in a text, so it is on the small side.
    """
    points, execution = [], []
    parts = torch.split(text.ids, batch)
    digests = [hashlib.sha256(part.numpy().tobytes()).hexdigest()[:24] for part in parts]
    for condition in conditions:
        samples = measure_missing(
            [
                (f"{condition.key} {text.name} {digest}", part)
                for digest, part in zip(digests, parts, strict=True)
            ],
            Windows,
            log,
            batch=1,
            length=len,
            measure=partial(_measure, model, condition, text),
            on_samples=partial(_tell, condition, on_windows),
        )
        losses = [nll for sample in samples for nll in sample.nll]
        plans = [blocks for sample in samples for blocks in sample.blocks]
        depths = [depth for sample in samples for depth in sample.depths]
        is_counted = condition.is_free and len(depths) == len(losses)
        depth = statistics.fmean(depths) if is_counted else None
        points += _points(condition, text, losses, depth)
        execution += execution_rates(condition, {text.name: plans}, {text.name: depth})
    return {"points": points, "execution": execution}


def _measure(
    model: BuddyForCausalLM, condition: Condition, text: WindowedText, parts: Sequence[Tensor]
) -> list[Windows]:
    """What is logged of each batch of windows."""
    samples = []
    for part in parts:
        measured = window_losses(model, condition, part, stride=text.stride, leaks=text.leaks)
        nll, blocks, depths = zip(*measured, strict=True)
        samples.append(Windows(task=text.name, nll=nll, blocks=blocks, depths=depths))
    return samples


def _tell(condition: Condition, on_windows: OnWindows, parts: Sequence[Tensor]) -> None:
    if parts:
        on_windows(condition, sum(map(len, parts)))


def _points(
    condition: Condition, text: WindowedText, losses: Sequence[float], depth: float | None
) -> list[dict[str, Any]]:
    mean, error = mean_and_error([loss / text.stride for loss in losses])
    rest = {
        "samples": len(losses),
        "tokens": len(losses) * text.stride,
        **condition.ran(depth),
    }
    # A broken model can be arbitrarily surprised; JSON has no infinity.
    value = math.exp(min(mean, 700.0))
    return [
        condition.point(
            text.name, "perplexity", value, stderr=None if error is None else value * error, **rest
        ),
        condition.point(text.name, "nll", mean, stderr=error, **rest),
    ]
