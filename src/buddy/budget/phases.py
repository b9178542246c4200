"""Phases as a caller writes them: the prompt, perhaps thinking, and the answer."""

import re
from typing import Final

from buddy.budget.amount import shown_value
from buddy.errors import BudgetError

_WRITTEN: Final = re.compile(
    r"\s*(?:prompt|(prefill))\s*:\s*([^,]+?)\s*,"
    r"(?:\s*think\s*:\s*([^,]+?)\s*,)?"
    r"\s*(?(1)decode|answer)\s*:\s*([^,]+?)\s*",
    re.ASCII,
)
PHASE_KEYS: Final = (("prompt", "answer"), ("prompt", "think", "answer"), ("prefill", "decode"))
"""The keys of an object, in their order."""


def written_phases(text: str) -> tuple[str, str | None, str]:
    """What a text such as `prompt:1.0,think:0.6,answer:1.0` says of each, if anything.

    Raises:
        BudgetError: It says it otherwise.
    """
    written = _WRITTEN.fullmatch(text)
    if written is None or (written[1] and written[3]):
        raise BudgetError(
            f"budget {shown_value(text)} cannot be read: to give prompt and answer budgets of "
            "their own write prompt:1.0,answer:0.5, and for thinking prompt:1.0,think:0.5,answer:1"
        )
    _, prompt, think, answer = written.groups()
    return prompt, think, answer
