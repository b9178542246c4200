"""Parts an answer, as it comes, into what was thought first and the rest."""

from buddy.budget.thinking import ThinkingMarks
from buddy.serving.overlap import overlap


class ThinkingReader:
    """Parts an answer, as it comes, into what was thought first and the rest.

    Neither part begins with space.

    Args:
        marks: Around the thinking.
        is_open: Whether the prompt has opened it.

    Attributes:
        is_open: Whether what comes next is thought.
    """

    def __init__(self, marks: ThinkingMarks, *, is_open: bool) -> None:
        self._marks, self._held = marks, ""
        self.is_open, self._may_open = is_open, not is_open
        self._is_at_start = True

    def push(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """What is sure to have been thought, and what is sure to be the answer's."""
        self._held += text
        if self._may_open and not self._opens(is_last=is_last):
            return "", ""
        thought = ""
        if self.is_open:
            thought, closes, rest = self._held.partition(self._marks.closes)
            cut = 0 if is_last or closes else overlap(thought, self._marks.closes)
            thought, self._held = thought[: len(thought) - cut], thought[len(thought) - cut :]
            thought = self._stripped(thought)
            if not closes:
                return thought, ""
            self.is_open, self._is_at_start, self._held = False, True, rest
        answer, self._held = self._stripped(self._held), ""
        return thought, answer

    def _opens(self, *, is_last: bool) -> bool:
        """Whether it is known by now if the answer begins with thinking."""
        begins = self._held.lstrip()
        self.is_open = begins.startswith(self._marks.opens)
        if not (self.is_open or is_last) and self._marks.opens.startswith(begins):
            return False
        self._may_open = False
        if self.is_open:
            self._held = begins.removeprefix(self._marks.opens)
        else:
            self._is_at_start = False  # an answer without thinking keeps its space
        return True

    def _stripped(self, text: str) -> str:
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text
