"""A chat's answer in its parts, as they come: what was thought, what is said, what is called."""

from dataclasses import dataclass

from buddy.serving.http.thinking import ThinkingReader
from buddy.serving.http.tool_calls import Call, CallReader


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer.

    Attributes:
        thought: Text between the marks of thinking.
        text: What is said.
        calls: Calls of tools that are complete.
    """

    thought: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of it."""
        return not (self.thought or self.text or self.calls)


class Speech:
    """Parts the text of one answer.

    Args:
        thinking: Reads what is thought; None = nothing is.
        calls: Reads calls; None = there are none.
    """

    def __init__(
        self, thinking: ThinkingReader | None = None, calls: CallReader | None = None
    ) -> None:
        self._thinking, self._calls = thinking, calls

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thought."""
        return self._thinking is not None and self._thinking.is_open

    def push(self, text: str, *, is_last: bool = False) -> Said:
        """What is sure of a text that has come, and of what was held of it before."""
        thought, calls = "", list[Call]()
        if self._thinking is not None:
            thought, text = self._thinking.push(text, is_last=is_last)
        if self._calls is not None:
            text, calls = self._calls.push(text, is_last=is_last)
        return Said(thought, text, tuple(calls))
