"""The threshold of a policy that keeps no budget: read from its name, or found for a mean depth."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from buddy.data.examples import Example
from buddy.depth.policy import Policy
from buddy.engine.feed import Feed
from buddy.engine.run import run_once
from buddy.errors import PolicyError, TrainingError
from buddy.model import BuddyForCausalLM

_WIDEST: Final = 20.0
"""Log-odds beyond which no threshold is looked for."""
_STEPS: Final = 14


def read_threshold(argument: str, policy: str, meaning: str) -> float:
    """The threshold that a user wrote as `POLICY:THRESHOLD`.

    Args:
        argument: What follows the colon.
        policy: The name before it.
        meaning: The range in words, for the message.

    Raises:
        PolicyError: It is no number from 0 to 1.
    """
    try:
        threshold = float(argument)
    except ValueError:
        threshold = -1.0
    if not 0 <= threshold <= 1:
        raise PolicyError(
            f"policy {policy}:THRESHOLD takes {meaning}, as in {policy}:0.4, got {argument[:80]!r}"
        )
    return threshold


def find_threshold(
    depth_at: Callable[[float], float],
    wanted: float,
    *,
    least: float,
    most: float,
    tolerance: float,
) -> tuple[float, float]:
    """Bisect the log-odds of the threshold; a higher one is to run more blocks.

    Args:
        depth_at: Runs the policy at a threshold, a probability; the mean depth, in blocks.
        wanted: Mean depth.
        least: That at threshold 0, where every token stops at once.
        most: That at threshold 1, where none stops.
        tolerance: By how much the depth may miss.

    Returns:
        The threshold and its mean depth.

    Raises:
        TrainingError: No threshold meets the depth.
    """
    if abs(wanted - most) <= tolerance:
        return 1.0, most
    if abs(wanted - least) <= tolerance:
        return 0.0, least
    if not least < wanted < most:
        raise TrainingError(
            f"no threshold has a mean depth of {wanted:g} blocks: this policy's are from {least:g} "
            f"to {most:g}; ask for one of these, or set another first_exit"
        )
    low, high, below, above = -_WIDEST, _WIDEST, least, most
    for _ in range(_STEPS):
        middle = (low + high) / 2
        threshold = 1 / (1 + math.exp(-middle))
        depth = depth_at(threshold)
        if abs(depth - wanted) <= tolerance:
            return threshold, depth
        if depth < wanted:
            low, below = middle, depth
        else:
            high, above = middle, depth
    raise TrainingError(
        f"no threshold has a mean depth of {wanted:g} blocks: it goes from {below:.2f} to "
        f"{above:.2f} in one step; ask for one of these, or set a larger tolerance"
    )


@torch.inference_mode()
def mean_depth(model: BuddyForCausalLM, policy: Policy, examples: Sequence[Example]) -> float:
    """Blocks that a token runs on average, over prompts and answers; routes see the prompts."""
    ran = fed = 0
    for example in examples:
        tokens = torch.tensor([*example.prompt, *example.answer], device=model.device)
        sees = torch.arange(len(tokens), device=model.device) < len(example.prompt)
        feed = Feed(token_ids=tokens, counts=(len(tokens),), router_sees=sees)
        out = run_once(model.backbone, policy, feed, [(model.num_blocks,)])
        ran, fed = ran + int(out.executed.sum()), fed + len(tokens)
    return ran / fed
