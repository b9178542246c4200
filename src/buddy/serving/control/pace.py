"""Pace: how fast the engine works, how fast requests and prompts come, when a first token will."""

import math
from dataclasses import dataclass
from typing import Final

from buddy.serving.control.protocol import QueueView

PROMPT_SHARE: Final = 0.25
"""Share of the engine's time that prompts get while they wait, whatever others were promised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast the engine works now; replaced whole, so any thread may read it."""

    step_s: float
    """Time from one token of a row to its next: at the least depth, where the controller would
    lower elastic rows to it before a request waits."""
    prompt_tokens_per_s: float
    """That are fed beside the rows that decode, as deep as these are for `step_s`."""
    tokens_per_answer: float
    """Mean of the answers that ended lately."""
    rows: int
    """That can run at a time without missing a target."""
    fixed_s: float = 0.0
    """Time from the last token of a prompt to the first of the answer, and the step under way."""


def predict_ttft(prompt_tokens: float, queue: QueueView, pace: Pace) -> float:
    """Seconds until a request's first token, if it were let in now.

    It waits until rows are free for all that came before it, and until their prompts and its own
    are fed. Both go on at the same time, so the longer one counts.

    Args:
        prompt_tokens: Of the request, each by its weight.
        queue: Those before it.
        pace: Of the engine.
    """
    feed = queue.prompt_tokens + queue.prompt_tokens_running + prompt_tokens
    feed_s = feed / max(pace.prompt_tokens_per_s, 1e-9)
    before = queue.running + queue.size + 1 - pace.rows
    row_s = 0.0
    if before > 0:  # by Little's law a row is free every (time of an answer / rows)
        row_s = before * pace.tokens_per_answer * pace.step_s / max(pace.rows, 1)
        row_s += prompt_tokens / max(pace.prompt_tokens_per_s, 1e-9)
    return max(feed_s, row_s) + pace.fixed_s


class Arrivals:
    """How many requests come a second: each counts less the longer ago it came.

    Args:
        over_s: Time in which its weight falls to 1 / e.
    """

    def __init__(self, over_s: float) -> None:
        self._over_s, self._rate, self._last_s = over_s, 0.0, 0.0

    def add(self, now: float) -> None:
        """One came."""
        self._rate, self._last_s = self.rate(now) + 1.0 / self._over_s, now

    def rate(self, now: float) -> float:
        """Requests a second."""
        return self._rate * math.exp(-max(now - self._last_s, 0.0) / self._over_s)


class PromptRate:
    """Tokens of prompts that are fed a second, on average over about two seconds."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._last_s: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """So many were fed in a pass."""
        if self._last_s is not None and now > self._last_s:
            over_s = now - self._last_s
            self.rate += min(1.0, over_s / 2.0) * (tokens / over_s - self.rate)
        self._last_s = now


class Dues:
    """Time that is owed to prompts which wait beside rows that decode: a share of what passes take.

    Attributes:
        owed_s: That is still owed; below zero, that was had too early.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0
        self._waits = self._is_paid = False

    def pays(self, cost_s: float, *, waits: bool) -> bool:
        """Whether a prompt is to be fed before the next pass, though it fits no limit.

        Args:
            cost_s: That it takes.
            waits: Whether any prompt waits.
        """
        self._waits = waits
        if not waits:
            self.owed_s = 0.0
        self._is_paid = waits and self.owed_s >= cost_s
        return self._is_paid

    def add(self, seconds: float, prompt_s: float) -> None:
        """Note a pass, and how much of its time was a prompt's."""
        if self._waits:
            self.owed_s += PROMPT_SHARE * seconds - prompt_s
            if not self._is_paid:  # what had room took nothing from anybody
                self.owed_s = max(self.owed_s, 0.0)
