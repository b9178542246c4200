"""The seam between HTTP and the engine, whoever is behind it: a thread here or a process."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from buddy.errors import BuddyError
from buddy.serving.request import Deliver, GenerationRequest

EngineState = Literal["ready", "draining", "failed"]


class Overloaded(BuddyError):
    """The queue is full, or the promised time to the first token is out of reach."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(BuddyError):
    """The engine takes nothing: it starts, drains, or has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What HTTP must know of the engine; it does not change while the server runs."""

    model: str
    """The name that clients use."""
    num_blocks: int
    least_blocks: int
    """The smallest budget that can be named."""
    context: int
    """Tokens that prompt and answer may have together."""
    has_predictor: bool
    """Whether `auto` can be asked for."""
    why_no_drafts: str | None = None
    """Why answers cannot be drafted; None = they can."""
    means: tuple[int, int] | None = None
    """The smallest and the largest mean of an answer that can be asked for, in blocks."""
    most_answers: int | None = None
    """That the engine holds at once, those that wait included; None = any number."""
    engine: str
    """A few words for a person."""
    least_ms_per_token: float
    """The shortest time for a token that this machine reaches alone, at the smallest budget."""


@runtime_checkable
class EngineClient(Protocol):
    """Takes requests and cancels them.

    Every method may be called from any thread and returns soon.
    """

    @property
    def facts(self) -> EngineFacts:
        """What is known of the model behind it."""
        ...

    @property
    def state(self) -> EngineState:
        """Whether it takes requests."""
        ...

    def submit(self, request: GenerationRequest, deliver: Deliver) -> int:
        """Queue a request.

        Returns:
            Its number, by which it is cancelled.

        Raises:
            Overloaded: It will not be taken now.
            Unavailable: Nothing is taken.
            BudgetError: Its deadline is below what the machine reaches.
            PromptError: Prompt and answer do not fit the context.
        """
        ...

    def cancel(self, number: int) -> None:
        """End a request; nothing more is delivered. One that has ended is no error."""
        ...

    def metrics(self) -> bytes:
        """Counters and gauges in Prometheus' text format."""
        ...

    def drain(self) -> None:
        """Take nothing new; what is there is finished."""
        ...

    def close(self, timeout_s: float) -> None:
        """End the engine; answers that are still under way fail."""
        ...
