"""Who is let into the queue: caps, the age of what waits, and the promised time to the first token.

What will not be served in time is refused at once, so that the client may go elsewhere while it is
still early.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from buddy.errors import BudgetError, PolicyError
from buddy.serving.client import Overloaded
from buddy.serving.control.pace import Pace, predict_ttft
from buddy.serving.control.protocol import QueueView, prompt_weight
from buddy.serving.request import GenerationRequest
from buddy.settings import Range, check_ranges

RETRY_S: Final = (1, 60)
"""Least and most of what Retry-After says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionConfig:
    """When requests are refused."""

    max_queue: Annotated[int, Range(0)] = 64
    """Requests that may wait."""
    max_age_s: Annotated[float, Range(above=0)] = 30.0
    """Nothing is let in while the first that waits has waited this long."""
    ttft_ms: Annotated[float, Range(above=0)] | None = None
    """The promised time to the first token; None = none is promised."""
    share: Annotated[float, Range(above=0, high=1)] = 0.8
    """Share of the promise that a prediction may use up, as predictions err."""

    def __post_init__(self) -> None:
        check_ranges(self, PolicyError)


class Refused(Overloaded):
    """An `Overloaded` that knows why, in a word for the metrics."""

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        low, high = RETRY_S
        super().__init__(message, min(high, max(low, math.ceil(retry_after_s))))
        self.reason = reason


class Admission:
    """Lets requests in or refuses them; called from any thread.

    Args:
        config: When requests are refused.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self.config = config

    def check(
        self, request: GenerationRequest, queue: QueueView, pace: Pace, least_ms: float
    ) -> None:
        """Return where a request may wait, else raise.

        Args:
            request: That came.
            queue: As it is now.
            pace: Of the engine.
            least_ms: The shortest time for a token of this request, alone, at its least budget.

        Raises:
            BudgetError: Its deadline is below what the machine reaches.
            Refused: It will not be taken now.
        """
        budget, config = request.budget, self.config
        if budget.ms_per_token < least_ms:
            raise BudgetError(
                f"a token takes at least {shown_ms(least_ms)} ms here at {budget.least} blocks, "
                f"and the budget allows {budget.ms_per_token:g}: ask for {shown_ms(least_ms)} ms "
                "per token or more"
            )
        weight = prompt_weight(request, budget.prompt, queue.head_blocks)
        ttft_s = predict_ttft(weight * len(request.prompt), queue, pace)
        waiting = queue.size - max(0, pace.rows - queue.running)  # those who find no free row
        if waiting >= config.max_queue:
            raise Refused(
                "queue_full",
                f"{waiting} requests wait already, and at most {config.max_queue} may: try "
                "again later",
                ttft_s,
            )
        if queue.oldest_s > config.max_age_s:
            raise Refused(
                "queue_age",
                f"the first request that waits has waited {queue.oldest_s:.0f} s, and at most "
                f"{config.max_age_s:g} s are allowed: try again later",
                queue.oldest_s - config.max_age_s / 2,
            )
        if config.ttft_ms is None or not request.is_first:
            return
        if not queue.running and not queue.size:
            return  # it would come no sooner later, and its answer corrects what is predicted
        if ttft_s > config.share * config.ttft_ms / 1e3:
            raise Refused(
                "ttft",
                f"the first token would take about {ttft_s:.1f} s, and "
                f"{config.ttft_ms / 1e3:g} s are promised: try again later",
                ttft_s - config.share * config.ttft_ms / 1e3,
            )


def shown_ms(milliseconds: float) -> str:
    """Rounded up, so that who asks for what is shown gets it."""
    if milliseconds >= 10:
        return str(math.ceil(milliseconds))
    return f"{math.ceil(milliseconds * 10) / 10:.1f}"
