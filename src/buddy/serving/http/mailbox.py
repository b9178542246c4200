"""Answers under way: the engine's thread puts events in, the event loop takes them out."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from buddy.errors import BuddyError
from buddy.serving.client import EngineClient
from buddy.serving.request import Deliver, Delta, Event, Failed, GenerationRequest

MOST_WAITING: Final = 1024
"""Events of one answer that wait for a client that reads slowly."""

_TOO_SLOW: Final = (
    "the client reads more slowly than the answer is made, so the answer was cancelled"
)


class Answers:
    """The answers to one HTTP request, from `submit` until all have ended.

    It may be made in any thread; all else is of the loop's.

    Args:
        engine: Makes them.
        requests: One for each answer.
        loop: Of whoever takes the events.
        is_streamed: Whether they are wanted as they come. Else the loop is left alone until an
            answer has ended: each waking takes a core from the step under way.
        most_waiting: Events of an answer that wait to be read. Where there are more, all answers
            are cancelled, and what waits is dropped: a client that never reads holds no more.

    Attributes:
        num_answers: How many there are.

    Raises:
        BuddyError: What the engine refuses; then nothing is under way.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[GenerationRequest],
        loop: asyncio.AbstractEventLoop,
        *,
        is_streamed: bool = True,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._engine, self._loop, self._is_streamed = engine, loop, is_streamed
        self._waiting: deque[tuple[int, Event]] = deque()
        self._most = most_waiting * len(requests)
        self._news = asyncio.Event()
        self.num_answers = len(requests)
        self._open = set(range(self.num_answers))
        self._numbers: list[int] = []
        self._is_cancelled = False
        try:
            for index, request in enumerate(requests):
                self._numbers.append(engine.submit(request, self._deliver(index)))
        except BuddyError:
            self.cancel()
            raise
        if self._is_cancelled:  # by the loop meanwhile, which did not know all numbers
            for number in self._numbers:
                engine.cancel(number)

    def cancel(self) -> None:
        """End what has not ended; nothing more is taken in."""
        if not self._is_cancelled:
            self._is_cancelled = True
            for index, number in enumerate(self._numbers):
                if index in self._open:
                    self._engine.cancel(number)
            self._open.clear()

    def give_up(self, why: str) -> None:
        """Cancel, drop what waits, and have the client told why."""
        self.cancel()
        self._waiting.clear()
        self._waiting.append((0, Failed(message=why)))
        self._news.set()

    async def take(self) -> list[tuple[int, Event]]:
        """What has come, by answer; waits for something. Empty once all has been taken."""
        while not self._waiting:
            if not self._open:
                return []
            self._news.clear()
            await self._news.wait()
        taken = []
        while self._waiting:  # to which the engine's thread may add
            taken.append(self._waiting.popleft())
        return taken

    def _deliver(self, index: int) -> Deliver:
        """What the engine's thread calls with each event."""

        def deliver(event: Event) -> None:
            if isinstance(event, Delta) and not self._is_streamed:
                self._waiting.append((index, event))
                return
            try:
                self._loop.call_soon_threadsafe(self._put, index, event)
            except RuntimeError:  # the loop has ended, and with it whoever would read this
                return

        return deliver

    def _put(self, index: int, event: Event) -> None:
        if self._is_cancelled:
            return
        if self._is_streamed and len(self._waiting) >= self._most:
            self.give_up(_TOO_SLOW)
            return
        self._waiting.append((index, event))
        if not isinstance(event, Delta):
            self._open.discard(index)
        self._news.set()
